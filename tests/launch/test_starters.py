"""What starters hand to the processes they start."""

import socket
from pathlib import Path

import pytest

from shardwise.environment import variables
from shardwise.launch.channel import Channel
from shardwise.launch.orders import Assembly, StartMeeting
from shardwise.launch.starters import PlainStarter


@pytest.mark.timeout(120)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_a_meeting_gets_the_environment_and_no_command_line_shows_it():
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    order = StartMeeting(
        host="127.0.0.1",
        port=store.port,
        run_id="one",
        node=0,
        nproc=3,
        least=1,
        most=1,
        join_s=60.0,
        last_call_s=0.1,
        environ={**variables(""), "MY_TOKEN": "hidden-word"},
    )
    ours, theirs = socket.socketpair()
    with theirs:
        process = PlainStarter().start_meeting(order, theirs)
    try:
        assert Channel(ours, Assembly).receive(60) == [Assembly((0,), (3,))]
        assert b"MY_TOKEN=hidden-word" in Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"MY_TOKEN" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        process.end()
        ours.close()
