"""One command for many machines, over real OpenSSH between namespaces: it runs, ends whole, and refuses in one line."""

import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from env import ssh
from refusals import assert_refused

pytestmark = [
    pytest.mark.skipif(bool(ssh.why_not()), reason=ssh.why_not() or "never"),
    pytest.mark.timeout(180),
]

LAUNCH = [sys.executable, "-m", "shardwise", "launch"]
NOTICED_S = 40
"""For silence to be noticed (8 s), and for processes to end on a busy machine."""

DDP = """
import os, socket, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
gradient = model.module.weight.grad[0, 0].item()
known = "SHARDWISE_SECRET" in os.environ
print(f"rank {dist.get_rank()} on {socket.gethostname()}: {gradient} {os.environ['NCCL_DEBUG']} {known}", flush=True)
dist.destroy_process_group()
"""
SLEEP = "import subprocess, time\nsubprocess.Popen(['sleep', '4711'])\nprint('ready', flush=True)\ntime.sleep(600)\n"
SAVE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75)))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in {"ddp.py": DDP, "sleep.py": SLEEP, "save.py": SAVE, "fail.py": "import sys; sys.exit(7)"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(host, argv, folder, timeout=90):
    return host.run(["env", "NCCL_DEBUG=WARN", *LAUNCH, *argv], cwd=folder, check=False, timeout=timeout)


def start(host, argv, folder, count):
    """Start a launch and wait until `count` ranks report that they are ready."""
    guest = host.popen(["env", *LAUNCH, *argv], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    heard = []
    while sum("ready" in line for line in heard) < count:
        line = guest.outer.stdout.readline()
        assert line, "".join(heard)
        heard.append(line)
    return guest


def wait_until_empty(*hosts):
    """Return the seconds until nothing but the ssh server runs on the hosts."""
    start_at = time.monotonic()
    while left := [command for host in hosts for command in ssh.left_on(host)]:
        assert time.monotonic() < start_at + NOTICED_S, left
        time.sleep(0.05)
    return time.monotonic() - start_at


@pytest.mark.slow
def test_two_hosts_from_one_command_run_a_ddp_job(folder):
    (folder / "hosts").write_text("# the machines\nhost0\n\nroot@host1 slots=2  # two ranks\n")
    with ssh.servers(2, shared=folder) as (a, b):
        done = run(a, ["--hosts", "hosts", "ddp.py"], folder)
        assert done.returncode == 0, done.stderr
        places = ["host0", "host1", "host1"]
        expected = {f"[{host}] rank {rank} on {host}: 1.0 WARN False" for rank, host in enumerate(places)}
        assert set(done.stdout.splitlines()) == expected
        assert wait_until_empty(a, b) < NOTICED_S


@pytest.mark.prove
def test_a_failing_rank_ends_all_hosts_with_its_exit_code_in_the_report(folder):
    with ssh.servers(3, shared=folder) as (launcher, a, b):
        done = run(launcher, ["--hosts", "host1,host2", "fail.py"], folder)
        assert done.returncode == 1
        assert "exit code 7" in done.stderr
        wait_until_empty(launcher, a, b)


@pytest.mark.prove
def test_a_stop_request_reaches_ranks_on_all_hosts_and_75_comes_back(folder):
    with ssh.servers(2, shared=folder) as (a, b):
        guest = start(a, ["--hosts", "host0,host1", "save.py"], folder, 2)
        guest.send_signal(15)
        heard = guest.outer.stdout.read()
        assert (guest.wait(NOTICED_S), heard.count("saved")) == (75, 2), heard
        wait_until_empty(a, b)


@pytest.mark.slow
def test_nothing_is_left_when_the_launcher_is_killed(folder):
    with ssh.servers(2, shared=folder) as (a, b):
        guest = start(a, ["--hosts", "host0,host1", "sleep.py"], folder, 2)
        guest.send_signal(9)
        wait_until_empty(a, b)


@pytest.mark.prove
def test_nothing_is_left_when_the_link_to_a_host_is_cut(folder):
    with ssh.servers(2, shared=folder) as (a, b):
        guest = start(a, ["--hosts", "host0,host1", "sleep.py"], folder, 2)
        b.cut()
        wait_until_empty(a, b)
        assert guest.wait(NOTICED_S) == 1


@pytest.mark.prove
def test_nothing_is_left_when_a_launcher_outside_of_the_nodes_is_disconnected(folder):
    with ssh.servers(3, shared=folder) as (launcher, a, b):
        guest = start(launcher, ["--hosts", "host1,host2", "sleep.py"], folder, 2)
        launcher.cut()
        wait_until_empty(launcher, a, b)
        assert guest.wait(NOTICED_S) == 1


@pytest.mark.prove
def test_nothing_is_left_when_a_host_powers_off(folder):
    with ssh.servers(3, shared=folder) as (launcher, a, b):
        guest = start(launcher, ["--hosts", "host1,host2", "sleep.py"], folder, 2)
        b.power_off()
        wait_until_empty(launcher, a)
        assert guest.wait(NOTICED_S) == 1


@pytest.mark.prove
def test_nothing_is_left_when_the_guard_or_the_ssh_client_is_killed(folder):
    with ssh.servers(2, shared=folder) as (a, b):
        for host, program in ((b, "launcher.ssh.remote"), (a, "ssh -T")):
            guest = start(a, ["--hosts", "host0,host1", "sleep.py"], folder, 2)
            victim = next(pid for pid, command in host.processes().items() if program in command)
            subprocess.run(["kill", "-9", str(victim)], check=True)
            wait_until_empty(a, b)
            assert guest.wait(NOTICED_S) == 1


BAD = {
    "no such host": (["--hosts", "host0,nowhere"], ("launch.host-not-resolved", "nowhere")),
    "refused key": (["--hosts", "host0,unknown@host1"], ("launch.host-login-refused", "ssh-copy-id host1")),
    "unknown host key": (["--hosts", "host0,unknown"], ("launch.host-key-unknown", "unknown")),
    "two names of one machine": (["--hosts", "host0,alias"], ("launch.host-same-machine", "host0", "alias")),
    "address of another machine": (
        ["--hosts", "host1,host2", "--master-addr", "host0"],
        ("launch.master-address-foreign", "--master-addr host0", "10.77.0.1", "host1 (it has 10.77.0.2 on eth0)"),
    ),
    "no way between the hosts": (["--hosts", "host1,host2"], ("launch.master-unreachable", "host2", "10.77.0.2:")),
    "malformed hostfile": (["--hosts", "bad"], ("launch.hostfile-unknown-key", "line 2 of bad", "'slot'")),
    "missing hostfile": (["--hosts", "./none"], ("launch.hostfile-not-found", "./none")),
    "duplicate host": (["--hosts", "host0,host1,host0"], ("launch.host-repeated", "host0", 2)),
    "no ssh server": (["--hosts", "host0,closed"], ("launch.host-no-sshd", "closed")),
    "script that does not exist": (
        ["--hosts", "host0,host1"],
        ("launch.script-not-found", "on host host1", "/tmp/own.py", "copy it"),
    ),
    "port in use": (["--hosts", "host1,host0", "--master-port", "22"], ("launch.host-cannot-listen", 22, "10.77.0.2")),
    "wrong number of nodes": (
        ["--hosts", "host0,host1", "--nnodes", "3"],
        ("launch.nnodes-hosts-mismatch", "--nnodes 3"),
    ),
    "two ways to start": (
        ["--hosts", "host0", "--kubernetes", "image=i"],
        ("cli.options-conflict", "--hosts", "--kubernetes"),
    ),
    "no ssh client": (["--hosts", "host0,host1"], ("launch.ssh-not-found", "host1")),
    "other version": (["--hosts", "host0,host1"], ("launch.host-version-mismatch", "host1 has shardwise 0.0.1")),
    "no shardwise": (["--hosts", "host0,host2"], ("launch.host-no-shardwise", "host2")),
    "no such folder": (["--hosts", "host0,host1"], ("launch.host-no-folder", "host1", "/tmp/only_here")),
}
"""Name -> options, and the error code with the values that the message contains."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Three hosts in one of which little is as it should be."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "sleep.py").write_text(SLEEP)
    (folder / "bad").write_text("host0\nhost1 slot=8\n")
    described = Path(metadata.distribution("shardwise")._path)
    (folder / "METADATA").write_text(re.sub(r"\nVersion: .*", "\nVersion: 0.0.1", (described / "METADATA").read_text()))
    (folder / "empty").mkdir()
    with ssh.servers(3, shared=folder) as hosts:
        names = "10.77.0.1 alias closed\n10.77.0.3 unknown\n"
        hosts[0].run(["sh", "-c", f"printf '{names}' >> /etc/hosts; touch /tmp/own.py; mkdir /tmp/only_here"])
        hosts[0].run(["sh", "-c", "printf 'Host closed\\n  Port 23\\n' >> /etc/ssh/ssh_config"])
        yield folder, hosts, described


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_within_seconds_and_leaves_nothing(broken, name):
    folder, hosts, described = broken
    options, refusal = BAD[name]
    script = "/tmp/own.py" if name == "script that does not exist" else folder / "sleep.py"
    environ = ["env", "PATH=/nowhere"] if name == "no ssh client" else ["env"]
    where = "/tmp/only_here" if name == "no such folder" else folder
    fault = faults(folder, described).get(name)
    if fault:
        hosts[fault[0]].run(["sh", "-c", fault[1]])
    start_at = time.monotonic()
    done = hosts[0].run([*environ, *LAUNCH, *options, script], cwd=where, check=False, timeout=60)
    took_s = time.monotonic() - start_at
    if fault:
        hosts[fault[0]].run(["sh", "-c", fault[2]])
    assert_refused(done.stderr, *refusal)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert took_s < 40  # a host that is waited for in vain takes two minutes
    assert not (Path(folder) / "runs").exists()
    wait_until_empty(*hosts)


def faults(folder, described):
    """Return what breaks a host for a case: name -> (host, command, command that mends it)."""
    package = Path(__file__).resolve().parents[2] / "src" / "shardwise"
    return {
        "other version": (
            1,
            f"mount --bind {folder}/METADATA {described}/METADATA",
            f"umount {described}/METADATA",
        ),
        "no shardwise": (2, f"mount --bind {folder}/empty {package}", f"umount {package}"),
        "no way between the hosts": (
            1,
            "ip route add blackhole 10.77.0.3",
            "ip route del blackhole 10.77.0.3",
        ),
    }
