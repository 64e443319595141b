"""Faults happen once, after their step, and close only the connections that they should."""

import subprocess
import sys
import textwrap

from torch.optim import optimizer

from shardwise.diagnosis.drill.drill import _remaining_processes
from shardwise.diagnosis.drill.faults import Fault, FaultMark, _StepCounter, _write_mark, arm, read_mark


def fault(folder, **more):
    return Fault(**{"kind": "kill", "rank": 1, "step": 3, "mark": str(folder / "fault.json"), **more})


def test_steps_of_an_optimizer_inside_another_count_once():
    seen = []
    steps = _StepCounter(seen.append)
    for _ in range(2):
        steps.begin()
        steps.begin()
        steps.end()
        steps.end()
    assert seen == [1, 2]


def test_a_fault_comes_with_the_step_of_any_optimizer(tmp_path):
    code = f"""
    import torch
    from shardwise.diagnosis.drill.faults import Fault, arm
    arm(Fault(kind="kill", rank=1, step=3, mark={str(tmp_path / "fault.json")!r}), 1)
    weight = torch.nn.Parameter(torch.zeros(1))
    each = torch.optim.SGD([weight], lr=0.1)
    for step in range(9):
        print(step, flush=True)
        each.step()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == -9, done.stderr
    assert done.stdout.split() == ["0", "1", "2"]
    assert read_mark(tmp_path / "fault.json").step == 3


def test_a_fault_that_came_does_not_come_again(tmp_path):
    before = len(optimizer._global_optimizer_post_hooks)
    _write_mark(fault(tmp_path), 1, 3)
    arm(fault(tmp_path), 1)
    assert len(optimizer._global_optimizer_post_hooks) == before


def test_the_first_mark_stays(tmp_path):
    _write_mark(fault(tmp_path), 1, 3, saved=2)
    _write_mark(fault(tmp_path), 0, 4)
    mark = read_mark(tmp_path / "fault.json")
    assert isinstance(mark, FaultMark)
    assert (mark.rank, mark.step, mark.saved) == (1, 3, 2)


def test_close_connections_ignores_the_store_and_listeners():
    # In a process of its own: it closes all connections of the process.
    code = """
    import socket
    from shardwise.diagnosis.drill.faults import close_connections
    listener, store = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    here, kept = (socket.create_connection(each.getsockname()) for each in (listener, store))
    there, _ = listener.accept()
    served, _ = store.accept()
    assert close_connections(store.getsockname()[1]) == 2
    assert there.recv(1) == b""
    kept.sendall(b"x")
    assert served.recv(1) == b"x"
    socket.create_connection(listener.getsockname()).close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_a_process_that_outlives_its_rank_is_found():
    with subprocess.Popen(["sleep", "60"], process_group=0) as stray:
        try:
            assert _remaining_processes({stray.pid}) == [stray.pid]
        finally:
            stray.kill()
    assert _remaining_processes({stray.pid}) == []
