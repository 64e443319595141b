"""Proofs of `shardwise launch`: fifty restarts, what each fault leaves behind, and that nobody else gets in."""

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten

import pytest

from e2e.processes import alive, state_and_parent, wait_for

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "shardwise", "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
METHODS = {
    "fork": ["--start-method", "fork"],
    "spawn": ["--start-method", "spawn"],
}
TORCHRUN_TRIALS, TORCHRUN_LIMIT_S = 10, 25
GONE_S = 10
"""All that a job started is gone this long after the fault."""

KILLED_SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
with open("attempts", "a") as file:
    file.write(attempt + "\\n")
if dist.get_rank() == 1 and int(attempt) < int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""

WAITING_SCRIPT = """
import os, pathlib, signal, subprocess, sys, time
import torch, torch.distributed as dist

before, *faults = sys.argv[1:]
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
rank = dist.get_rank()
if rank == 0:
    exec(before)
pathlib.Path(f"ready.{rank}").write_text(f"{os.getpid()} {os.environ['MASTER_PORT']} .")
while not pathlib.Path("go").exists():
    time.sleep(0.02)
if rank < 2:
    exec(faults[rank])
"""


@dataclass(frozen=True)
class Job:
    """A running launch whose ranks have joined and wait; everything it started carries its mark."""

    folder: Path
    launcher: subprocess.Popen
    mark: str
    terminal: int | None

    def processes(self):
        """Every living process that descends from the launcher, itself included, wherever it was handed to."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return [pid for pid in found if alive(pid)]

    def listening(self):
        """Return inode -> (address, port, pid) of every socket on which a process of the job listens."""
        rows = listening_rows()
        found = {}
        for pid in self.processes():
            for inode in sockets_of(pid):
                if inode in rows:
                    found[inode] = (*rows[inode], pid)
        return found

    def ranks(self):
        """Return the process ids of the ranks and the port of their store."""
        texts = [path.read_text().split() for path in sorted(self.folder.glob("ready.*"))]
        return [int(pid) for pid, _, _ in texts], int(texts[0][1])

    def output(self):
        return (self.folder / "out").read_text(errors="replace")

    def files(self):
        """Temporary files: in the job's TMPDIR, and sockets and half-written files where it works."""
        half = [p for p in self.folder.rglob("*") if p.suffix == ".tmp" or stat.S_ISSOCK(p.lstat().st_mode)]
        return [*(self.folder / "tmp").iterdir(), *half]


def sockets_of(pid):
    found = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink())):
                    found.add(match[1])
    return found


def listening_rows():
    """Return inode -> (hexadecimal address, port) of every listening socket of this network namespace."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    rows = [line.split() for line in lines]
    places = {row[9]: row[1].split(":") for row in rows if row[3] == "0A"}
    return {inode: (address, int(port, 16)) for inode, (address, port) in places.items()}


def shared_memory():
    """Files of /dev/shm that no living process has mapped: what a dead one forgot."""
    names = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names are what is compared
    maps = ""
    for entry in Path("/proc").iterdir():
        if names and entry.name.isdigit():
            with contextlib.suppress(OSError):
                maps += (entry / "maps").read_text()
    return {name for name in names if f"/dev/shm/{name}" not in maps}


@contextlib.contextmanager
def running(folder, method="fork", *, before="", faults=("", ""), terminal=False, nproc=2):
    """Launch the waiting script and yield once all ranks have joined; whatever is left after is killed."""
    (folder / "script.py").write_text(WAITING_SCRIPT)
    (folder / "tmp").mkdir()
    mark = f"PROOF_OF_SHARDWISE={uuid.uuid4().hex}"
    environ = {**os.environ, "TMPDIR": str(folder / "tmp"), mark.partition("=")[0]: mark.partition("=")[2]}
    command = [*LAUNCH, "--nproc", str(nproc), *METHODS[method], "script.py", before, *faults]
    master, slave = os.openpty() if terminal else (None, None)
    with (folder / "out").open("w") as file:
        launcher = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=slave,
            stdout=slave if terminal else file,
            stderr=slave if terminal else file,
            start_new_session=terminal,
            preexec_fn=partial(fcntl.ioctl, slave, termios.TIOCSCTTY, 0) if terminal else None,  # noqa: PLW1509 - no threads
        )
    if terminal:
        os.close(slave)
    job = Job(folder, launcher, mark, master)
    try:
        ready = [folder / f"ready.{rank}" for rank in range(nproc)]
        wait_for(lambda: all(path.exists() and path.read_text().endswith(".") for path in ready), 60, job.output)
        yield job
    finally:
        for pid in job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


def go(job):
    (job.folder / "go").touch()


def send(*numbers):
    def act(job):
        for number in numbers:
            job.launcher.send_signal(number)
            time.sleep(0.5)

    return act


def close_terminal(job):
    os.close(job.terminal)


def kill_fork_parent(job):
    parent = state_and_parent(job.ranks()[0][0])[1]
    assert parent != job.launcher.pid
    os.kill(parent, signal.SIGKILL)


def kill_store(job):
    ranks, port = job.ranks()
    (pid,) = {pid for _, own, pid in job.listening().values() if own == port and pid not in ranks}
    os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Fault:
    """What happens to a waiting job, and the exit code that the launcher ends with."""

    code: int
    worker: str = ""
    """What rank 1 runs; its peer then waits for it in an all_reduce."""
    act: object = go
    peer: str = "dist.all_reduce(torch.ones(1))"
    before: str = "subprocess.Popen(['sleep', '1000'])"
    """What rank 0 runs before: it has a child process, throughout."""
    terminal: bool = False
    methods: tuple[str, ...] = tuple(METHODS)


DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(['sleep', '1000'])"
SESSION = "subprocess.Popen(['sleep', '1000'], start_new_session=True)"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FAULTS = {
    "worker raises": Fault(1, "raise ValueError('rank one is tired')"),
    "worker SIGKILL": Fault(1, KILL),
    "worker SIGSEGV": Fault(1, "os.kill(os.getpid(), signal.SIGSEGV)"),
    "worker SIGABRT": Fault(1, "os.kill(os.getpid(), signal.SIGABRT)"),
    "worker leaves early with 7": Fault(1, "os._exit(7)"),
    "worker leaves early with 0": Fault(1, "os._exit(0)"),
    "worker SIGKILL, its peer ignores SIGTERM": Fault(1, KILL, peer="time.sleep(1000)", before=DEAF),
    "worker SIGKILL, its peer has a child in a session of its own": Fault(1, KILL, before=SESSION),
    "launcher SIGTERM": Fault(130, act=send(signal.SIGTERM)),
    "launcher SIGINT": Fault(130, act=send(signal.SIGINT)),
    "launcher SIGINT twice, a worker ignores SIGTERM": Fault(130, act=send(signal.SIGINT, signal.SIGINT), before=DEAF),
    "launcher SIGHUP": Fault(130, act=send(signal.SIGHUP)),
    "terminal closed": Fault(130, act=close_terminal, terminal=True),
    "launcher SIGKILL": Fault(-9, act=send(signal.SIGKILL)),
    "launcher SIGKILL, a worker has a child in a session of its own": Fault(
        -9, act=send(signal.SIGKILL), before=SESSION
    ),
    "fork parent SIGKILL": Fault(1, act=kill_fork_parent, methods=("fork",)),
    "fork parent SIGKILL, a worker has a child in a session of its own": Fault(
        1, act=kill_fork_parent, before=SESSION, methods=("fork",)
    ),
    "store SIGKILL": Fault(1, act=kill_store),
}
CASES = [(name, method) for name, fault in FAULTS.items() for method in fault.methods]
SLICE = random.Random(1).sample([case for case in CASES if case[1] == "fork"], 2)


@dataclass(frozen=True)
class Row:
    """What came of one fault."""

    code: int | None
    last: str
    left: tuple[int, int, int]
    """Processes, ports, files."""
    seconds: float


def suffer(folder, name, method):
    """Run one fault; return its row, taken when all is gone or after GONE_S, and the processes that are left."""
    fault = FAULTS[name]
    forgotten = shared_memory()
    with running(
        folder,
        method,
        before=fault.before,
        faults=(fault.peer, fault.worker),
        terminal=fault.terminal,
    ) as job:
        ports = set(job.listening())
        assert ports
        start = time.monotonic()
        fault.act(job)

        def left():
            return {
                "processes": job.processes(),
                "ports": ports & set(listening_rows()),
                "files": [*job.files(), *(shared_memory() - forgotten)],
            }

        while any(found := left().values()) and time.monotonic() - start < GONE_S:
            job.launcher.poll()  # reaps it
            time.sleep(0.05)
        end = time.monotonic()
        names = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in job.processes()]
        code = job.launcher.poll()
        return Row(code, last_line(job.output()), tuple(map(len, found)), end - start), names


def last_line(output):
    """The last line a user reads, but for the one that names the run directory after every failure."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("shardwise: the run is in")]
    return re.sub(r"pid \d+", "pid N", re.sub(r"runs/\S+", "runs/NAME-TIME", lines[-1])) if lines else ""


def check_fault(folder, name, method):
    row, names = suffer(folder, name, method)
    assert row.left == (0, 0, 0), (row, names)
    assert row.code == FAULTS[name].code, row
    return row


@pytest.fixture(scope="module")
def table():
    """Rows of docs/results/launch-faults.md, written when the whole proof has run."""
    rows = {}
    yield rows
    if len(rows) == len(CASES):
        (ROOT / "docs" / "results" / "launch-faults.md").write_text(render(rows))


def render(rows):
    lines = [
        "# Processes, ports and files after a fault",
        "",
        "Made by `make prove`. Two gloo ranks train, rank 0 with a child process, when a fault occurs. The table has",
        f"the job's processes, open ports and temporary files that remain after {GONE_S} s; the last column is the",
        "time until none remained. Ranks are forked from one process, or (`spawn`) are new processes. A negative",
        "exit code is a signal. The last line of a failure is followed by one that names the run directory.",
        "",
        "| fault | ranks | exit code | last line | processes | ports | files | gone after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, method in CASES:
        row = rows[name, method]
        left = " | ".join(map(str, row.left))
        last = shorten(row.last.replace("|", "\\|"), 100, placeholder=" ...")
        lines.append(f"| {name} | {method} | {row.code} | {last} | {left} | {row.seconds:.1f} s |")
    return "\n".join([*lines, ""])


@pytest.mark.parametrize(("name", "method"), SLICE)
def test_fault_leaves_nothing_behind(tmp_path, name, method):
    check_fault(tmp_path, name, method)


@pytest.mark.prove
@pytest.mark.parametrize(("name", "method"), CASES)
def test_every_fault_leaves_nothing_behind(tmp_path, table, name, method):
    table[name, method] = check_fault(tmp_path, name, method)


def killed(folder, command, kills, limit_s):
    """Launch a script that loses rank 1 in its first attempts; return how many times each attempt's ranks joined."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(KILLED_SCRIPT)
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen(
        [*command, "--nproc-per-node=2", f"--max-restarts={kills}", "script.py", str(kills)], cwd=folder, **output
    )
    try:
        done = launcher.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        launcher.terminate()
        launcher.wait(60)
        done = False
    attempts = [int(line) for line in (folder / "attempts").read_text().split()]
    return done, {attempt: attempts.count(attempt) for attempt in attempts}


def check_recoveries(folder, kills):
    done, num_joined = killed(folder, LAUNCH, kills, 100 + 5 * kills)
    recovered = sum(num_joined.get(attempt, 0) >= 1 for attempt in range(1, kills + 1))
    assert (done, recovered, num_joined.get(kills)) == (True, kills, 2), num_joined


def test_five_kills_are_five_recoveries(tmp_path):
    check_recoveries(tmp_path, 5)


@pytest.mark.prove
def test_fifty_kills_are_fifty_recoveries(tmp_path, capsys):
    check_recoveries(tmp_path / "ours", 50)
    theirs = [killed(tmp_path / f"theirs{i}", TORCHRUN, 1, TORCHRUN_LIMIT_S)[0] for i in range(TORCHRUN_TRIALS)]
    with capsys.disabled():
        print(f"\nrecoveries after kill -9: shardwise 50 of 50, torchrun {sum(theirs)} of {TORCHRUN_TRIALS}")


@pytest.fixture
def neighbour():
    """A network namespace that is linked to this one: its name, and this one's address on the link."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    number = os.getpid() % 250
    name, ours, theirs = f"swproof{number}", f"swa{number}", f"swb{number}"
    host, guest = f"10.200.{number}.1", f"10.200.{number}.2"

    def ip(*argv):
        return subprocess.run(["ip", *argv], capture_output=True, text=True, check=False)

    made = ip("netns", "add", name)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        for argv in (
            ("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name),
            ("addr", "add", f"{host}/24", "dev", ours),
            ("link", "set", ours, "up"),
            ("-n", name, "addr", "add", f"{guest}/24", "dev", theirs),
            ("-n", name, "link", "set", theirs, "up"),
            ("-n", name, "link", "set", "lo", "up"),
        ):
            done = ip(*argv)
            assert done.returncode == 0, (argv, done.stderr)
        yield name, host
    finally:
        ip("link", "del", ours)
        ip("netns", "del", name)


CONNECT = """
import json, socket, sys
answers = {}
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=2).close()
        answers[port] = "answers"
    except OSError as error:
        answers[port] = type(error).__name__
print(json.dumps(answers))
"""


def connect(prefix, host, ports):
    command = [*prefix, sys.executable, "-c", CONNECT, host, *map(str, sorted(ports))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def check_privacy(folder, neighbour, method, nproc):
    name, host = neighbour
    with (
        running(folder, method, nproc=nproc) as job,
        socket.create_server(("0.0.0.0", 0)) as open_door,
    ):
        ports = {port for _, port, _ in job.listening().values()}
        assert len(ports) > nproc  # the store's, and one of every rank
        inside = connect([], "127.0.0.1", ports)
        assert set(inside.values()) == {"answers"}
        control = open_door.getsockname()[1]
        outside = connect(["ip", "netns", "exec", name], host, {*ports, control})
        assert outside.pop(str(control)) == "answers"  # the link works, so a refusal means something
        assert "answers" not in outside.values(), outside


def test_nothing_answers_another_network_namespace(tmp_path, neighbour):
    check_privacy(tmp_path, neighbour, "fork", 2)


@pytest.mark.prove
@pytest.mark.parametrize(("method", "nproc"), [("fork", 1), ("fork", 4), ("spawn", 2), ("spawn", 4)])
def test_nothing_of_any_job_answers_another_network_namespace(tmp_path, neighbour, method, nproc):
    check_privacy(tmp_path, neighbour, method, nproc)
