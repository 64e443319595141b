import pytest

from shardwise.launcher.explain import read_exception

TRACEBACK = """some warning
Traceback (most recent call last):
  File "first.py", line 1, in <module>
KeyError: 'handled'
Traceback (most recent call last):
  File "script.py", line 3, in <module>
    raise ValueError("tired")
{last}
"""


@pytest.mark.parametrize(
    ("last", "kind", "message", "peer_lost"),
    [
        ("ValueError: rank one is tired", "ValueError", "rank one is tired", False),
        ("my.module.OddError", "OddError", "", False),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection closed by peer", "RuntimeError", None, True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", "DistNetworkError", None, True),
        ("RuntimeError: all_reduce over mpi waited 30 s for the other ranks", "RuntimeError", None, True),
        ("ValueError: Connection closed by peer", "ValueError", None, False),
    ],
)
def test_uncaught_exception_is_read_from_the_log(tmp_path, last, kind, message, peer_lost):
    (tmp_path / "log").write_text(TRACEBACK.format(last=last))
    failure = read_exception(tmp_path / "log", 3)
    assert (failure.rank, failure.kind, failure.peer_lost) == (3, kind, peer_lost)
    assert message is None or failure.message == message
    assert "first.py" not in failure.traceback


def test_prefix_of_torch_is_left_out(tmp_path):
    lines = TRACEBACK.format(last="ValueError: tired").splitlines()
    (tmp_path / "log").write_text("".join(f"[rank1]: {line}\n" for line in lines))
    failure = read_exception(tmp_path / "log", 1)
    assert (failure.kind, failure.message, "[rank1]" in failure.traceback) == ("ValueError", "tired", False)


def test_log_without_a_traceback_gives_none(tmp_path):
    (tmp_path / "log").write_text("ValueError: not a traceback\n")
    assert read_exception(tmp_path / "log", 0) is None
    assert read_exception(tmp_path / "absent", 0) is None
