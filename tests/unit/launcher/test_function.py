import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import shardwise as sw


def add_up(value):
    dist.init_process_group("gloo")
    total = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_function_returns_its_values_by_rank():
    assert sw.launch(add_up, 10, nproc=2) == [21.0, 21.0]


def test_world_finds_itself_inside():
    def who():
        with sw.world() as world:
            return world.rank, world.size, world.sum({"x": 1.0})["x"]

    assert sw.launch(who, nproc=3) == [(0, 3, 3.0), (1, 3, 3.0), (2, 3, 3.0)]


def test_process_with_threads_is_not_forked_and_closures_travel_all_the_same(capsys):
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        secret = 5

        def closure():
            print("hello from a rank")
            return add_up(secret)

        assert sw.launch(closure, nproc=2) == [11.0, 11.0]
    finally:
        release.set()
        thread.join()
    assert capsys.readouterr().out.count("hello from a rank") == 2


def test_functions_that_use_our_packages_travel_from_a_process_with_threads():
    def who():
        with sw.world() as world:
            return world.rank

    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert sw.launch(who, nproc=2) == [0, 1]
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize("threads", [False, True])
def test_exception_of_the_failing_rank_is_raised(threads):
    def fail():
        raise ValueError("no good")

    release = threading.Event()
    thread = threading.Thread(target=release.wait if threads else lambda: None)
    thread.start()
    try:
        with pytest.raises(ValueError, match="no good") as caught:
            sw.launch(fail, nproc=2)
    finally:
        release.set()
        thread.join()
    assert "in fail" in caught.value.__notes__[0]


def test_bad_count_is_refused():
    from refusals import (
        refuses,
    )  # not above: ranks that are fresh processes import this file, without the folder of tests

    with refuses("launch.nproc-invalid", 0):
        sw.launch(add_up, nproc=0)


def test_options_of_launch_are_not_passed_to_the_function():
    from refusals import refuses

    def loaded(name, *, suffix=""):
        import sys

        return name in sys.modules, suffix

    assert sw.launch(loaded, "torch", suffix="x", nproc=1) == [(True, "x")]
    assert sw.launch(loaded, "torch", suffix="x", nproc=1, start_method="spawn") == [(False, "x")]
    with refuses("spec.value-invalid", "forkserver"):
        sw.launch(loaded, "torch", start_method="forkserver")
    with refuses("launch.option-of-scripts", "max_restarts", "nproc", "start_method"):
        sw.launch(loaded, "torch", nproc=1, max_restarts=3)


def test_a_parameter_with_the_name_of_an_option_is_refused_unless_passed_by_position():
    from refusals import refuses

    def role_of(role, tee=1):
        return role, tee

    with refuses("launch.option-is-parameter", "role_of", "tee"):
        sw.launch(role_of, "main", nproc=1, tee="3")
    with refuses("launch.option-is-parameter", "role_of", "role"):
        sw.launch(role_of, role="main", nproc=1)
    assert sw.launch(role_of, "main", 3, nproc=1) == [("main", 3)]


def test_plain_script_needs_no_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import shardwise as sw\nprint(sw.launch(lambda: 'done', nproc=2))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout == "['done', 'done']\n", done.stderr
