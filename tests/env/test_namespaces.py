"""Hosts in namespaces see each other, not the outside; faults have the effect of their names; nothing is left."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from env import namespaces

pytestmark = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "never")

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))"
ANSWER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as door:
    print("open", flush=True)
    while True:
        end, _ = door.accept()
        while data := end.recv(1 << 20):
            end.sendall(b"." * (len(data) == 1))
        end.close()
"""
ASK = """
import socket, sys, time
end = socket.create_connection((sys.argv[1], 7000), timeout=20)
size, start = int(sys.argv[2]), time.monotonic()
end.sendall(b"x" * size)
if size == 1:
    end.recv(1)
else:
    end.shutdown(socket.SHUT_WR)
    end.recv(1)
print(time.monotonic() - start)
"""


def reaches(host, address, port, patience_s=30):
    done = host.run([sys.executable, "-c", CONNECT, address, port, patience_s], check=False)
    return done.returncode == 0


def answering(host):
    guest = host.popen([sys.executable, "-c", ANSWER, host.address], stdout=subprocess.PIPE, text=True)
    assert guest.outer.stdout.readline() == "open\n"
    return guest


def seconds(host, other, size):
    return float(host.run([sys.executable, "-c", ASK, other.address, size]).stdout)


def test_hosts_see_each_other_by_name_and_not_the_outside(tmp_path):
    with namespaces.hosts(2, shared=tmp_path) as (a, b), socket.create_server(("0.0.0.0", 0)) as outside:
        answering(b)
        assert reaches(a, "host1", 7000)
        assert not reaches(a, "127.0.0.1", outside.getsockname()[1], 1)
        assert a.run(["hostname"]).stdout == "host0\n"
        assert b.listening() == {("10.77.0.2", 7000)}
        a.run(["sh", "-c", f"echo here > {tmp_path}/file; touch /tmp/own"])
        assert b.run(["sh", "-c", f"cat {tmp_path}/file; ls /tmp/own || true"]).stdout == "here\n"


def test_faults_have_the_effect_of_their_names(tmp_path):
    with namespaces.hosts(3) as (a, b, c):
        guest = answering(b)
        b.cut()
        assert not reaches(a, b.address, 7000, 1)
        b.restore()
        assert reaches(a, b.address, 7000)
        assert any("7000" in command for command in b.processes().values())
        b.crash()
        assert guest.poll() == -9
        assert b.processes() == {}
        answering(c)
        c.power_off()
        assert not reaches(a, c.address, 7000, 1)


def test_bandwidth_and_delay_are_what_was_asked_for():
    with namespaces.hosts(2) as (a, b):
        b.delay(20)
        answering(b)
        assert 0.04 <= seconds(a, b, 1) < 1
    with namespaces.hosts(2) as (a, b):
        b.limit("100mbit")
        answering(b)
        assert 0.3 < seconds(a, b, 5_000_000) < 4  # 0.4 s; an unlimited link 0.01 s


def test_nothing_is_left_when_the_test_is_killed(tmp_path):
    body = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r}); import namespaces\n"
        "with namespaces.hosts(1) as (a,):\n"
        "    a.popen(['sleep', '4711'])\n"
        "    print(a.pid, a.switch, flush=True)\n"
        "    time.sleep(100)\n"
    )
    test = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    pids = test.stdout.readline().split()
    test.kill()
    test.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
