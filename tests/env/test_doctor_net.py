"""`doctor net` over real OpenSSH between namespaces: it names the pair, and nothing is left whatever ends it."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from env import ssh
from env.nodes import wait_until

pytestmark = [
    pytest.mark.skipif(bool(ssh.why_not()), reason=ssh.why_not() or "never"),
    pytest.mark.timeout(180),
]
DOCTOR = [sys.executable, "-m", "shardwise", "doctor", "net"]
LEFT_S = 40
"""For silence to be noticed (8 s), and for processes to end on a busy machine."""
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"sum {int(total)}", flush=True)
dist.destroy_process_group()
"""


def examine(host, folder, *argv, where=None):
    """Run the doctor on a host; return its exit code and what it wrote."""
    done = host.run([*DOCTOR, *argv], cwd=where or folder, check=False, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def bad(found):
    """Return (state, name, fact) of all verdicts that are not ok."""
    verdicts = json.loads(found)["verdicts"]
    return [(one["state"], one["name"], one["fact"]) for one in verdicts if one["state"] != "ok"]


def assert_nothing_left(folder, *hosts):
    wait_until(lambda: not any(ssh.left_on(host) for host in hosts), LEFT_S, lambda: str([*map(ssh.left_on, hosts)]))
    for host in hosts:
        assert {port for _, port in host.listening()} == {22}
    assert list(folder.glob(".shardwise*")) == []


def test_a_cut_pair_is_named_and_nothing_is_left(tmp_path):
    with ssh.servers(3, shared=tmp_path) as (a, b, c):
        b.run(["ip", "route", "add", "unreachable", c.address])
        c.run(["ip", "route", "add", "unreachable", b.address])
        code, output = examine(a, tmp_path, "--hosts", "host0,host1,host2")
        assert code == 3
        lines = output.splitlines()
        failed = [line for line in lines if line.startswith("fail")]
        assert len(failed) == 1, output
        assert "host1 does not reach host2 at 10.77.0.3 (No route to host), nor in the other direction" in failed[0]
        assert lines[-3:-1] == [
            "# without host2",
            "shardwise launch --hosts host0,host1 --master-addr 10.77.0.1 train.py",
        ]
        assert_nothing_left(tmp_path, a, b, c)


def test_a_delay_between_two_hosts_is_named_with_the_pair(tmp_path):
    with ssh.servers(2, shared=tmp_path) as (a, b):
        b.delay(10)
        code, found = examine(a, tmp_path, "--hosts", "host0,host1", "--json")
        slow = [one for one in bad(found) if one[2].startswith("host0 and host1: latency ")]
        assert [one[:2] for one in slow] == [("warn", "links")], found
        assert code == 0
        assert all(link["latency_s"] >= 0.01 for link in json.loads(found)["facts"]["links"])
        assert_nothing_left(tmp_path, a, b)


@pytest.mark.prove
def test_a_host_behind_a_delay_is_named_and_the_others_are_not(tmp_path):
    with ssh.servers(3, shared=tmp_path) as (a, _, c):
        c.delay(10)
        _, found = examine(a, tmp_path, "--hosts", "host0,host1,host2", "--json")
        latency = [fact for _, _, fact in bad(found) if "latency" in fact]
        assert len(latency) == 1
        assert latency[0].startswith("every link of host2: latency ")


@pytest.mark.prove
def test_a_thin_link_is_named(tmp_path):
    with ssh.servers(3, shared=tmp_path) as (a, b, _):
        b.limit("20mbit")
        _, found = examine(a, tmp_path, "--hosts", "host0,host1,host2", "--json")
        assert any(fact.startswith("every link of host1: bandwidth ") for _, _, fact in bad(found)), found


@pytest.mark.prove
def test_a_way_that_loses_large_packets_is_named(tmp_path):
    with ssh.servers(3, shared=tmp_path) as (a, _, c):
        ssh.namespaces._on(a.switch, "ip", "link", "set", c.port, "mtu", "1300")
        code, found = examine(a, tmp_path, "--hosts", "host0,host1,host2", "--json")
        assert code == 3
        facts = [fact for _, name, fact in bad(found) if name == "MTU"]
        assert facts == [
            "packets above 1280 bytes are lost between host2 and the other hosts, although the MTU is 1500"
        ]


@pytest.mark.prove
def test_names_versions_storage_logins_and_ports_that_are_wrong_are_named_at_once(tmp_path):
    described = metadata.distribution("shardwise")._path
    changed = (described / "METADATA").read_text().replace("\nVersion: ", "\nVersion: 9.", 1)
    (tmp_path / "METADATA").write_text(changed)
    with ssh.servers(4, shared=tmp_path) as (a, b, c, d):
        b.run(["sh", "-c", f"mount --bind {tmp_path}/METADATA {described}/METADATA"])
        b.run(["sh", "-c", "printf '127.0.1.1 host1\\n10.77.0.1 host0\\n10.77.0.3 host2\\n' > /etc/hosts"])
        for host in (a, b, c):
            host.run(["mkdir", "/tmp/own"])
        d.cut()
        argv = ["--hosts", "host0,host1,host2,host3", "--folder", "/tmp/own", "--folder", "/nowhere", "--port", "22"]
        code, found = examine(a, tmp_path, *argv, "--json")
        assert code == 3
        assert [one[1] for one in bad(found)] == ["login", "versions", "names", "storage", "storage", "port"]
        facts = [one[2] for one in bad(found)]
        assert facts[0] == "host host3 is unreachable"
        assert facts[1].startswith("shardwise differs: hosts host0, host2 have ")
        assert facts[2] == "host1, the host name of host1, resolves on host1 to 127.0.1.1, a loopback address"
        assert facts[3].startswith("/tmp/own of hosts host1, host2 is not shared with host0")
        assert facts[4] == "hosts host0, host1, host2 have no directory /nowhere"
        assert facts[5] == "host0 cannot listen on port 22 (10.77.0.1): Address already in use"


@pytest.mark.prove
def test_the_launch_line_works(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with ssh.servers(3, shared=tmp_path) as (a, b, c):
        code, found = examine(a, tmp_path, "--hosts", "host1,host2", "--json")
        assert code == 0, found
        line = json.loads(found)["launch"][0].removeprefix("shardwise ")
        done = a.run([sys.executable, "-m", "shardwise", *line.split()], cwd=tmp_path, check=False, timeout=120)
        assert done.stdout.splitlines().count("[host1] sum 2") == 1, done.stderr
        assert done.returncode == 0
        assert_nothing_left(tmp_path, a, b, c)


@pytest.mark.prove
@pytest.mark.parametrize("signal", [2, 9, 15])
def test_nothing_is_left_when_the_doctor_is_ended(tmp_path, signal):
    with ssh.servers(3, shared=tmp_path) as (a, b, c):
        b.run(["ip", "route", "add", "blackhole", c.address])  # so that it takes long enough to be caught
        guest = a.popen([*DOCTOR, "--hosts", "host0,host1,host2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        while "connecting from every host" not in (line := guest.outer.stderr.readline()):
            assert line, "it ended before"
        guest.send_signal(signal)
        guest.wait(LEFT_S)
        assert_nothing_left(tmp_path, a, b, c)


@pytest.mark.prove
def test_nothing_is_left_when_a_link_is_cut_during_the_check(tmp_path):
    with ssh.servers(3, shared=tmp_path) as (a, b, c):
        b.run(["ip", "route", "add", "blackhole", c.address])
        guest = a.popen([*DOCTOR, "--hosts", "host0,host1,host2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        while "connecting from every host" not in (line := guest.outer.stderr.readline()):
            assert line, "it ended before"
        c.cut()
        assert guest.wait(2 * LEFT_S) == 3
        assert_nothing_left(tmp_path, a, b, c)
