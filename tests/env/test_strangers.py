"""What a machine without the secret can do to a run on other machines: every port that listens is tried from there."""

import json
import re
import sys

import pytest

from env.namespaces import hosts, why_not
from env.nodes import LAUNCH, start, wait_until

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "never"),
    pytest.mark.timeout(300),
]
HUB = ("10.77.0.1", 29500)

SCRIPT = """
import os, pathlib, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
pathlib.Path(f"ready.{dist.get_rank()}").touch()
enough = torch.zeros(1)
while not enough:
    enough = torch.tensor([float(pathlib.Path("enough").exists())])
    dist.all_reduce(enough, op=dist.ReduceOp.MIN)
    time.sleep(0.01)
second = dist.new_group([0, 1])  # connections anew, at ports that other clients have tried
total = torch.ones(1)
dist.all_reduce(total, group=second)
os.write(1, f"done {int(total)}\\n".encode())
dist.destroy_process_group()
"""

CLIENT = """
import contextlib, json, socket, sys

def connect(address, port):
    with contextlib.suppress(OSError):
        return socket.create_connection((address, port), timeout=2)

def answer(address, port, *lines):
    "Return what comes back for these lines; None without a connection."
    end = connect(address, port)
    if end is None:
        return None
    end.settimeout(8)
    heard = b""
    with end, contextlib.suppress(OSError):
        end.sendall(b"".join(lines))
        while data := end.recv(4096):
            heard += data
    return heard.decode()

hub, store, others = json.loads(sys.argv[1])
proof = json.dumps({"type": "proof", "mac": "00" * 32, "nonce": "00" * 16}).encode() + b"\\n"
hello = json.dumps({"type": "hello", "host": "x", "node_rank": 1, "facts": {}}).encode() + b"\\n"
found = {
    "hub, no message": answer(*hub),
    "hub, wrong proof": answer(*hub, proof),
    "hub, no proof": answer(*hub, hello),
    "store": answer(*store, b"\\x00" * 64),
    "others": [connect(*other) is not None for other in others],
}
connections = [connect(*hub) for _ in range(300)]
connections += [connect(*other) for other in others for _ in range(100)]
for end in connections[300:]:
    if end is not None:
        end.sendall(b"\\xff" * 64)
print(json.dumps(found))
sys.stdout.flush()
sys.stdin.read()  # keeps its connections until the run has ended
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run on two of three hosts, its ranks at work; the hosts, the nodes and the address of its store."""
    monkeypatch.setenv("SHARDWISE_SECRET", "a secret of two hosts")
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "client.py").write_text(CLIENT)
    with hosts(3, shared=tmp_path) as made:
        case = [*LAUNCH, "--nnodes=2", "--nproc_per_node=1", f"--master_addr={HUB[0]}", f"--master_port={HUB[1]}"]
        nodes = [start(made[0], tmp_path, [*case, "--node_rank=0", "job.py"])]
        # The other node is admitted by a store that is open, and has node 0 waiting at it.
        wait_until(lambda: len(made[0].listening()) == 2, 60, nodes[0].output)
        nodes.append(start(made[1], tmp_path, [*case, "--node_rank=1", "job.py"]))
        ready = [tmp_path / f"ready.{rank}" for rank in range(2)]
        wait_until(lambda: all(path.exists() for path in ready), 120, lambda: "".join(node.output() for node in nodes))
        [(address, port)] = re.findall(r"store at (\S+):(\d+);", nodes[0].output())
        yield made, nodes, (address, int(port))


def test_an_unauthenticated_client_cannot_join_nor_reach_the_store_and_floods_end_nothing(run, tmp_path):
    made, nodes, store = run
    listening = made[0].listening() | made[1].listening()
    assert store in listening
    others = sorted(listening - {HUB, store})
    client = made[2].popen(
        [sys.executable, "client.py", json.dumps([HUB, store, others])], cwd=tmp_path, stdin=-1, stdout=-1, text=True
    )
    found = json.loads(client.outer.stdout.readline())
    for case in ("hub, no message", "hub, wrong proof", "hub, no proof"):
        [challenge] = map(json.loads, found[case].splitlines())
        assert challenge["type"] == "challenge"  # and then the hub hung up
    assert found["store"] is None
    # What torch leaves open, as docs/reference/launch-security.md describes: gloo listens for whoever reaches it.
    assert others
    assert all(found["others"])
    (tmp_path / "enough").touch()
    assert [node.wait(120) for node in nodes] == [0, 0], nodes[0].output() + nodes[1].output()
    assert "done 2" in nodes[0].output()
    client.outer.stdin.close()
    assert client.wait(60) == 0
