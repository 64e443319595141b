"""What a rank does, from its stacks."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from shardwise.diagnosis.guard.stacks import (
    Sample,
    cpu_seconds,
    describe_activity,
    io_bytes,
    process_state,
    send_stacks_signal,
)
from shardwise.runs.recorder import Frame, parse_stack

USER = Frame("/home/me/train.py", 41, "main")
SLEEP = Frame("/home/me/train.py", 44, "wait_for_it")
LOADER = Frame("/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 10, "__next__")
INDUCTOR = Frame("/env/lib/python3.11/site-packages/torch/_inductor/codecache.py", 10, "compile")
EVAL_FRAME = Frame("/env/lib/python3.11/site-packages/torch/_dynamo/eval_frame.py", 10, "_fn")
SAVE = Frame("/env/lib/python3.11/site-packages/torch/serialization.py", 10, "save")


def samples(*stacks, cpu=0.0):
    return [Sample(stack, at * cpu, float(at)) for at, stack in enumerate(stacks)]


def test_a_real_dump_is_parsed_for_the_thread_that_is_asked_for(tmp_path):
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    stack = parse_stack((tmp_path / "stacks").read_text(), threading.get_ident())
    assert stack[0].function == "test_a_real_dump_is_parsed_for_the_thread_that_is_asked_for"
    assert parse_stack((tmp_path / "stacks").read_text(), 1) == ()


def test_the_users_innermost_frame_is_the_place():
    activity = describe_activity(samples((LOADER, USER)))
    assert (activity.place, activity.function, activity.inside) == ("/home/me/train.py:41", "main", "__next__")


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (LOADER, "waits for data"),
        (INDUCTOR, "compiles"),
        (SAVE, "saves or loads a checkpoint"),
        (EVAL_FRAME, ""),
        (USER, ""),
        (Frame("/env/lib/python3.11/site-packages/numpy/lib/_npyio_impl.py", 5, "save"), "saves or loads a checkpoint"),
        (Frame("/usr/lib/python3.11/shutil.py", 5, "copyfileobj"), "copies files"),
        (Frame("/usr/lib/python3.11/subprocess.py", 5, "wait"), "waits for a program it started"),
        (Frame("/home/me/train.py", 5, "evaluate"), "evaluates"),
        (Frame("/home/me/train.py", 5, "run_validation_epoch"), "evaluates"),
        (Frame("/home/me/train.py", 5, "save_state"), "saves or loads a checkpoint"),
        (Frame("/home/me/train.py", 5, "train_and_evaluate"), ""),
        (Frame("/env/lib/python3.11/site-packages/other/loop.py", 5, "evaluate"), ""),
    ],
)
def test_files_and_the_users_functions_show_what_a_stack_is_about(frame, kind):
    assert describe_activity(samples((frame, USER))).kind == kind


def test_a_stack_that_changes_moves():
    assert describe_activity(samples((USER,), (SLEEP, USER))).is_moving
    assert not describe_activity(samples((SLEEP, USER), (SLEEP, USER))).is_moving


def test_a_loop_within_one_function_stays_where_it_is():
    other_line = Frame(SLEEP.file, SLEEP.line + 1, SLEEP.function)
    assert not describe_activity(samples((SLEEP, USER), (other_line, USER))).is_moving


def test_processor_time_is_counted_between_the_first_and_the_last_look():
    assert describe_activity(samples((USER,), (USER,), (USER,), cpu=0.8)).cores == pytest.approx(0.8)


def test_bytes_are_counted_between_the_first_and_the_last_look():
    looks = [Sample((USER,), 0.0, float(at), at * 500) for at in range(4)]
    assert describe_activity(looks).bytes_per_s == pytest.approx(500)


def test_bytes_that_a_process_reads_and_writes_count(sleeper, tmp_path):
    process = sleeper(f"open({str(tmp_path / 'f')!r}, 'wb').write(bytes(1 << 20))")
    assert io_bytes(process.pid) >= 1 << 20


def test_without_a_stack_nothing_is_reported():
    assert describe_activity(samples((), ())) is None


@pytest.fixture
def sleeper():
    """A process that sleeps, and is ended here."""
    started = []

    def start(code):
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}\nprint(flush=True)\nimport time; time.sleep(60)"], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_without_a_handler_is_not_signalled(sleeper):
    process = sleeper("")
    assert not send_stacks_signal(process.pid, signal.SIGRTMIN + 11)
    assert process_state(process.pid) == "running"


def test_a_process_with_a_handler_writes_its_stacks_and_lives(sleeper, tmp_path):
    number = signal.SIGRTMIN + 11
    process = sleeper(
        f"import faulthandler; f = open({str(tmp_path / 's')!r}, 'a'); faulthandler.register({number:d}, file=f)"
    )
    assert send_stacks_signal(process.pid, number)
    deadline = time.monotonic() + 10
    while not (tmp_path / "s").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "in <module>" in (tmp_path / "s").read_text()
    assert process.poll() is None


def test_states_of_a_process_are_distinguished(sleeper):
    process = sleeper("")
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while process_state(process.pid) != "stopped" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_state(process.pid) == "stopped"
    process.kill()
    process.wait()
    assert process_state(process.pid) == "gone"
    assert cpu_seconds(process.pid) == 0.0


def test_processor_time_of_children_counts(sleeper):
    busy = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'while True: pass'])"
    process = sleeper(busy)
    before = cpu_seconds(process.pid)
    deadline = time.monotonic() + 20
    while cpu_seconds(process.pid) - before < 0.2 and time.monotonic() < deadline:
        time.sleep(0.02)
    used = cpu_seconds(process.pid) - before
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False).stdout
    for child in children.split():
        os.kill(int(child), signal.SIGKILL)
    assert used >= 0.2
