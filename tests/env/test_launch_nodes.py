"""`shardwise launch` on many machines: hosts are namespaces, faults are real, torchrun stands beside."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import pytest

from env.namespaces import hosts, why_not
from env.nodes import LAUNCH, LIGHT, SCRIPT, TORCHRUN, attempts, last_line, progress, start, wait_until
from refusals import assert_refused

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "never"),
    pytest.mark.timeout(300),
]
NOTICED_S = 10
"""Every fault is noticed within this time."""
LEFT_S = 45
"""What still runs after this time is left behind: a disconnected host detects it after 5 s, busy ones end later."""
TORCHRUN_S = 30
"""How long torchrun is watched after a fault."""
STATIC = ["--master_addr=10.77.0.1", "--master_port=29500"]
C10D = ["--rdzv_id=100", "--rdzv_backend=c10d", "--rdzv_endpoint=10.77.0.1:29400"]


def run_job(folder, count, options, *, order, ranks=True, script=SCRIPT, arguments=("4", "0")):
    """Run the job on `count` hosts, launchers started in `order`; return their outputs by node."""
    (folder / "ddp.py").write_text(script)
    with hosts(count, shared=folder) as made:
        nodes = {}
        for number in order:
            rank = [f"--node_rank={number}"] if ranks else []
            argv = [*LAUNCH, f"--nnodes={count}", "--nproc_per_node=1", *rank, *options, "ddp.py", *arguments]
            nodes[number] = start(made[number], folder, argv)
            time.sleep(0.5)
        codes = {number: node.wait(120) for number, node in nodes.items()}
        outputs = {number: node.output() for number, node in nodes.items()}
        assert set(codes.values()) == {0}, outputs
        assert [host.processes() for host in made] == [{}] * count
    return outputs


def places(outputs):
    """Return which host had which rank."""
    found = dict(re.findall(r"done (\d+) of \d+ on (\S+)", "".join(outputs.values())))
    return [found[str(rank)] for rank in range(len(found))]


def test_two_hosts_train_by_static_rendezvous_whoever_starts_first(tmp_path):
    outputs = run_job(tmp_path, 2, STATIC, order=[1, 0], script=LIGHT)
    assert places(outputs) == ["host0", "host1"]
    assert attempts(tmp_path) == [(2, 0)]


@pytest.mark.prove
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
@pytest.mark.parametrize("options", [STATIC, C10D], ids=["static", "c10d"])
@pytest.mark.parametrize("count", [2, 3])
def test_hosts_train_by_either_rendezvous_in_any_order(tmp_path, count, options, order):
    outputs = run_job(tmp_path, count, options, order=[node for node in order if node < count])
    assert places(outputs) == [f"host{node}" for node in range(count)]  # ranks follow node order, also by c10d


@pytest.mark.prove
def test_nodes_without_rank_join_at_the_endpoint(tmp_path):
    outputs = run_job(tmp_path, 3, C10D, order=[2, 0, 1], ranks=False)
    assert places(outputs)[0] == "host0"
    assert sorted(places(outputs)) == ["host0", "host1", "host2"]


ENTRY_POINT = """
import argparse, datetime, os
import torch, torch.distributed as dist

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--tensor-model-parallel-size", type=int)
parser.add_argument("--local-rank", type=int, default=int(os.getenv("LOCAL_RANK", "0")))
parser.parse_args()
elastic = ["GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
assert all(name in os.environ for name in elastic) and dist.is_torchelastic_launched()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, False)  # the launcher's own
assert store.add(f"seen/{rank}", 1) == 1
dist.init_process_group("gloo", world_size=size, rank=rank, timeout=datetime.timedelta(minutes=2))
rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
total = torch.tensor(float(rank))
dist.all_reduce(total, group=rows[rank // 2])
dist.all_reduce(total, group=columns[rank % 2])
assert total == 6
os.write(1, f"done {rank} of {size} on {os.uname().nodename}\\n".encode())
dist.destroy_process_group()
"""
"""As Megatron and NeMo begin: torchrun's variables, rank and size given, groups of rows and columns."""


@pytest.mark.prove
def test_entry_points_of_frameworks_run_unchanged(tmp_path):
    outputs = run_job(
        tmp_path,
        2,
        [*C10D, "--nproc-per-node=2"],
        order=[0, 1],
        script=ENTRY_POINT,
        arguments=["--tensor-model-parallel-size", "2"],
    )
    assert places(outputs) == ["host0", "host0", "host1", "host1"]


GALLERY = ROOT / "examples" / "01-ddp-basics"
SEEDS = {
    "static": (
        "--nnodes=2 --nproc_per_node=1 --node_rank={node} --master_addr=10.0.0.1 --master_port=29500",
        "ddp_training.py --epochs 1 --limit 128 --data none --checkpoint {folder}/c.pt",
    ),
    "c10d": (
        "--nnodes=2 --nproc_per_node=1 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29400",
        "train_ddp.py --epochs 1 --batch-size 64 --limit 128 --data none",
    ),
    "c10d with a node rank": (
        "--nnodes=2 --nproc_per_node=1 --node_rank={node} --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29500",
        "train_byt5_ddp.py --steps 2 --report 1",
    ),
}
"""The guide's lines for several machines; only the counts are smaller."""


@pytest.mark.prove
@pytest.mark.parametrize(("options", "script"), SEEDS.values(), ids=SEEDS)
def test_lines_of_the_guide_run_as_written(tmp_path, options, script):
    with hosts(2, shared=tmp_path, network="10.0.0") as made:
        nodes = []
        for host in made:
            argv = f"{options} --log-dir {tmp_path / 'run'} {script}".format(node=host.number, folder=tmp_path).split()
            nodes.append(start(host, tmp_path, [*LAUNCH, *argv], cwd=GALLERY))
        assert [node.wait(150) for node in nodes] == [0, 0], nodes[0].output() + nodes[1].output()
    assert "of 2; store at 10.0.0.1:" in nodes[1].output()


FAILING = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
open(f"joined.{dist.get_rank()}", "w")
while not os.path.exists("go"):
    time.sleep(0.02)
if dist.get_rank() == 1:
    raise ValueError("rank one is tired")
dist.all_reduce(torch.ones(1))
"""


def test_every_node_ends_with_the_root_cause_and_only_eth0_listened(tmp_path):
    (tmp_path / "job.py").write_text(FAILING)
    with hosts(2, shared=tmp_path) as made:
        nodes = [
            start(host, tmp_path, [*LAUNCH, "--nnodes=2", f"--node_rank={host.number}", *STATIC, "job.py"])
            for host in made
        ]
        texts = lambda: "\n".join(node.output() for node in nodes)  # noqa: E731 - a message, evaluated where it is used
        wait_until(lambda: len(list(tmp_path.glob("joined.*"))) == 2, 90, texts)
        listening = made[0].listening() | made[1].listening()
        (tmp_path / "go").touch()
        assert [node.wait(60) for node in nodes] == [1, 1], texts()
        # Node 1 has shown the traceback of its rank as it was written; node 0 quotes it in its report.
        for node, first in zip(nodes, ["ValueError: rank one is tired", "rank 1: its traceback is above"], strict=True):
            report = [line for line in node.output().splitlines() if line][-3:]
            assert report[0].startswith(first), node.output()
            assert node.output().count('raise ValueError("rank one is tired")') == 1, node.output()
            assert report[1] == "rank 1 on node 1 (host1) failed first: ValueError: rank one is tired"
            assert report[2].startswith("shardwise: the run is in")
        assert [host.processes() for host in made] == [{}, {}]
    assert ("10.77.0.1", 29500) in listening
    assert {address for address, _ in listening} <= {"10.77.0.1", "10.77.0.2"}


@pytest.mark.prove
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_request_to_one_node_stops_a_run_that_needs_it(tmp_path, number):
    (tmp_path / "ddp.py").write_text(LIGHT)
    with hosts(2, shared=tmp_path) as made:
        nodes = [
            start(
                host, tmp_path, [*LAUNCH, "--nnodes=2", f"--node_rank={host.number}", *STATIC, "ddp.py", "9999", "0.05"]
            )
            for host in made
        ]
        wait_until(lambda: progress(tmp_path) >= 2, 90, lambda: nodes[0].output() + nodes[1].output())
        nodes[1].guest.send_signal(number)
        assert [node.wait(20) for node in nodes] == [130, 130], nodes[0].output() + nodes[1].output()
        assert [host.processes() for host in made] == [{}, {}]


JOB = """
import os, time, torch
import shardwise as sw

job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    data=sw.datasets.digits, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-2), batch_size=128, epochs=20,
    on_step=lambda _: time.sleep(0.0 if os.path.exists("fast") else 0.3),
)
"""


def events(folder, kind):
    paths = folder.glob("runs/*/events/rank0.jsonl")
    found = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


@pytest.mark.prove
def test_training_grows_and_shrinks_with_the_global_batch_unchanged(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    argv = [sys.executable, "-m", "shardwise", "train", "job.py", "--save-every=5", "--nnodes=1:2", *C10D]
    argv += ["--rdzv-conf=last_call_timeout=1"]
    with hosts(2, shared=tmp_path) as made:
        nodes = [start(made[0], tmp_path, argv)]
        texts = lambda: "\n".join(node.output() for node in nodes)  # noqa: E731 - a message, evaluated where it is used
        wait_until(lambda: events(tmp_path, "steps"), 90, texts)
        nodes.append(start(made[1], tmp_path, argv))
        wait_until(lambda: len(events(tmp_path, "start")) == 2, 90, texts)
        time.sleep(2)
        made[1].cut()
        wait_until(lambda: len(events(tmp_path, "start")) == 3, 60, texts)
        (tmp_path / "fast").touch()
        assert nodes[1].wait(30) == 1
        assert re.search(r"node 0 \(10\.77\.0\.1\), .* was silent for", nodes[1].output())
        assert nodes[0].wait(90) == 0, texts()
        assert [host.processes() for host in made] == [{}, {}]
    batches = [dict(fact[:2] for fact in event["facts"])["batch"] for event in events(tmp_path, "start")]
    assert [batch.partition(" = ")[0] for batch in batches] == ["128"] * 3
    assert [batch.rpartition(" x ")[2] for batch in batches] == ["dp 1", "dp 2", "dp 1"]
    assert re.findall(r"resumed from .* at step (\d+)", texts())
    assert events(tmp_path, "end")[0]["steps"] == 240


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """A node 0 that waits for a second node, and two hosts for those that will not become it."""
    folder = tmp_path_factory.mktemp("waiting")
    (folder / "job.py").write_text("print('never')")
    (folder / "old" / "torch-1.0.dist-info").mkdir(parents=True)
    (folder / "old" / "torch-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n"
    )
    with hosts(2, shared=folder) as made:
        node = start(made[0], folder, [*LAUNCH, "--nnodes=2", "--node_rank=0", *STATIC, "job.py"])
        wait_until(lambda: ("10.77.0.1", 29500) in made[0].listening(), 60, node.output)
        made[1].run(["sh", "-c", "echo 10.77.0.9 elsewhere >> /etc/hosts; echo 10.77.0.1 zero >> /etc/hosts"])
        yield folder, made, node


BAD = {
    "no such host": (["--node_rank=1", "--master_addr=nowhere", "job.py"], "rendezvous.host-not-resolved", "'nowhere'"),
    "host name that resolves elsewhere": (
        ["--node_rank=0", "--master_addr=elsewhere", "job.py"],
        "launch.master-address-foreign",
        "10.77.0.9",
        "(it has 10.77.0.2 on eth0)",
    ),
    "another command": (
        ["--node_rank=1", "--master_addr=zero", "job.py", "--lr=2"],
        "rendezvous.nodes-differ",
        "has command 'job.py --lr=2'",
    ),
    "another number of nodes": (
        ["--nnodes=3", "--node_rank=1", "--master_addr=zero", "job.py"],
        "rendezvous.nodes-differ",
        "has --nnodes '3:3'",
    ),
    "another run": (["--node_rank=1", "--master_addr=zero", "--rdzv_id=7", "job.py"], "rendezvous.wrong-secret"),
    "another torch": (
        ["--node_rank=1", "--master_addr=zero", "job.py"],
        "rendezvous.nodes-differ",
        "has torch '1.0'",
        "node 0 (host0) has '2",
    ),
    "a port of a different program": (
        ["--node_rank=1", "--master_addr=10.77.0.2", "--master_port=29777", "job.py"],
        "rendezvous.unknown-peer",
        "10.77.0.2:29777",
    ),
    "nobody there": (
        ["--node_rank=1", "--master_addr=zero", "--master_port=29666", "--rdzv_conf=timeout=2", "job.py"],
        "rendezvous.unreachable",
        "zero:29666",
        "2 s (Connection refused)",
    ),
    "local address of another": (
        ["--node_rank=0", "--master_addr=10.77.0.2", "--local_addr=10.77.0.1", "job.py"],
        "launch.local-address-unknown",
        "--local-addr 10.77.0.1",
    ),
}
MUTE = "import socket, time; s = socket.create_server(('10.77.0.2', 29777)); time.sleep(60)"


@pytest.mark.representative("no such host", "host name that resolves elsewhere", "another command", "nobody there")
@pytest.mark.parametrize("name", BAD)
def test_node_that_cannot_join_is_rejected_with_one_sentence(waiting, name):
    arguments, *refusal = BAD[name]
    folder, made, node = waiting
    environ = {**os.environ, **({"PYTHONPATH": str(folder / "old")} if name == "another torch" else {})}
    before = set(made[1].processes())
    if name == "a port of a different program":
        made[1].popen([sys.executable, "-c", MUTE])
        wait_until(lambda: ("10.77.0.2", 29777) in made[1].listening(), 30)
        before = set(made[1].processes())
    done = made[1].run([*LAUNCH, "--nnodes=2", *STATIC[1:], *arguments], cwd=folder, check=False, env=environ)
    assert done.returncode == 2, done.stderr
    assert_refused(done.stderr, *refusal)
    assert set(made[1].processes()) == before
    assert node.guest.poll() is None, node.output()  # node 0 waits on for the right one


@dataclass(frozen=True)
class Row:
    """What came of one fault."""

    noticed: float | None
    """Seconds; None when nobody noticed while it was watched."""
    seen: str
    """The first that a user reads of it, on node 0."""
    left: str
    continued: str


def kill_worker(hosts_, nodes, folder):
    hosts_[1].run(["kill", "-9", (folder / "pid.host1").read_text()])


FAULTS = {
    "worker dies": kill_worker,
    "agent dies": lambda hosts_, nodes, folder: nodes[1].guest.send_signal(signal.SIGKILL),
    "host crashes": lambda hosts_, nodes, folder: hosts_[1].crash(),
    "host powers off": lambda hosts_, nodes, folder: hosts_[1].power_off(),
    "link is cut": lambda hosts_, nodes, folder: hosts_[1].cut(),
    "host joins": None,
}
LAUNCHERS = {"shardwise": LAUNCH, "torchrun": TORCHRUN}


def suffer(folder, fault, launcher):
    """Run an elastic job of one to two hosts, let the fault happen to the second, and watch the first."""
    (folder / "ddp.py").write_text(LIGHT)
    joins = FAULTS[fault] is None
    argv = [*LAUNCHERS[launcher], "--nnodes=1:2", "--nproc_per_node=1", "--max_restarts=3", *C10D]
    argv += ["--redirects=3", f"--log_dir={folder / 'logs'}", "--rdzv_conf=last_call_timeout=4", "--local_addr"]
    limit = NOTICED_S if launcher == "shardwise" else TORCHRUN_S
    with hosts(2, shared=folder) as made:

        def launch(host):
            return start(host, folder, [*argv, host.address, "ddp.py", "1000000", "0.05"])

        nodes = [launch(host) for host in made[: 1 if joins else 2]]
        texts = lambda: "\n".join(node.output() for node in nodes)  # noqa: E731 - a message, evaluated where it is used
        wait_until(lambda: progress(folder) >= 3, 90, texts)
        assert attempts(folder)[-1][0] == (1 if joins else 2), texts()
        before, known = len(nodes[0].output()), len(attempts(folder))
        usual = len(made[1].processes()) if fault == "worker dies" else 0
        if joins:
            nodes.append(launch(made[1]))
        else:
            FAULTS[fault](made, nodes, folder)
        begun = time.monotonic()
        noticed = watch(nodes[0], before, limit)
        seen = (nodes[0].output()[before:].strip().splitlines() or ["nothing"])[0]
        continued = continues(folder, known, nodes[0], 45 if launcher == "shardwise" else TORCHRUN_S)
        while (left := 0 if joins else max(0, len(made[1].processes()) - usual)) and time.monotonic() - begun < LEFT_S:
            time.sleep(0.05)
        return Row(noticed, seen, f"{left} process{'es' * (left > 1)}" if left else "nothing", continued), texts()


def watch(node, before, seconds):
    """Return the seconds until a launcher prints something new, None when it does not."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        if node.output()[before:].strip():
            return time.monotonic() - begun
        time.sleep(0.02)
    return None


def continues(folder, known, node, seconds):
    """Describe how training continued after the first `known` attempts."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        found = attempts(folder)
        if len(found) > known:
            size, first = found[-1]
            return f"on {size} host{'s' if size > 1 else ''} from step {first}"
        if node.guest.poll() is not None:
            return f"no: exit code {node.guest.poll()}"
        time.sleep(0.05)
    return f"not within {seconds} s"


def check(folder, fault):
    row, texts = suffer(folder, fault, "shardwise")
    assert row.noticed is not None, texts
    assert row.noticed <= NOTICED_S, texts
    assert row.left == "nothing", texts
    assert re.fullmatch(r"on [12] hosts? from step [1-9]\d*", row.continued), (row, texts)
    return row


def test_cut_link_is_detected_and_training_continues(tmp_path):
    row = check(tmp_path, "link is cut")
    assert "node 1 (host1) is lost: silent for" in row.seen
    assert row.continued.startswith("on 1 host ")


@pytest.fixture(scope="module")
def table():
    """Rows of docs/results/launch-nodes-faults.md, written when the whole proof has run."""
    rows = {}
    yield rows
    if len(rows) == len(FAULTS) * len(LAUNCHERS):
        (ROOT / "docs" / "results" / "launch-nodes-faults.md").write_text(render(rows))


def render(rows):
    lines = [
        "# Faults of a run on several machines",
        "",
        "Made by `make prove`. Two hosts (network namespaces) with one gloo rank each, `--nnodes=1:2",
        "--max-restarts=3`, and a checkpoint after every step; the fault occurs on the host without the store.",
        "Detected after: seconds until the launcher of the other host prints a message. torchrun was observed for",
        f"{TORCHRUN_S} s. Left behind: processes on the host with the fault that are no longer part of the run.",
        "A host is lost after 5 s without a heartbeat, the default of `--node-timeout`.",
        "",
        "| fault | launcher | detected after | first message | left behind | training continues |",
        "|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        for launcher in LAUNCHERS:
            row = rows[fault, launcher]
            noticed = "never" if row.noticed is None else f"{row.noticed:.1f} s"
            text = re.sub(r"^[A-Z]\d+ [\d:.]+ +\d+ \S+ ", "", row.seen.replace("|", "\\|"))  # torchrun's log prefix
            seen = shorten(text.replace(sys.executable, "python"), 90, placeholder=" ...")
            lines.append(f"| {fault} | {launcher} | {noticed} | {seen} | {row.left} | {row.continued} |")
    return "\n".join([*lines, ""])


@pytest.mark.prove
@pytest.mark.parametrize("how", ["crash", "power_off"])
def test_loss_of_the_stores_node_ends_the_run_with_a_report(tmp_path, how):
    (tmp_path / "ddp.py").write_text(LIGHT)
    with hosts(2, shared=tmp_path) as made:
        argv = [*LAUNCH, "--nnodes=1:2", *C10D, "ddp.py", "9999", "0.05"]
        nodes = [start(host, tmp_path, argv) for host in made]
        wait_until(lambda: progress(tmp_path) >= 2, 90, lambda: nodes[0].output() + nodes[1].output())
        begun = time.monotonic()
        getattr(made[0], how)()
        assert nodes[1].wait(20) == 1
        assert time.monotonic() - begun < NOTICED_S + 5  # ranks get some time to end
        assert "node 0 (10.77.0.1), " in last_line(nodes[1].output())
        assert made[1].processes() == {}


@pytest.mark.prove
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_detected_leaves_nothing_and_training_continues(tmp_path, table, fault):
    table[fault, "shardwise"] = check(tmp_path, fault)


@pytest.mark.prove
@pytest.mark.parametrize("fault", FAULTS)
def test_torchruns_row_beside_it(tmp_path, table, fault):
    table[fault, "torchrun"] = suffer(tmp_path, fault, "torchrun")[0]
