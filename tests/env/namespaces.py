"""Hosts as namespaces: each with its own network, host name, processes, /etc/hosts, /tmp and /dev/shm, on one bridge.

    with hosts(2, shared=tmp_path) as (a, b):
        agent = b.popen(["python", "train.py"], cwd=tmp_path)
        a.run(["ping", "-c", "1", b.address])
        b.cut()

Needs root and iproute2 (`why_not()` names what is missing). Everything hangs on processes that die with this one, so
that nothing is left even when the test is killed.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]

RELAY = Path(__file__).with_name("relay.py")
_INIT = "trap '' CHLD; exec sleep infinity"
"""Process 1 of a host: the kernel reaps its orphans, as an init would."""


def why_not():
    """Return in one line why hosts cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "hosts as namespaces need root"
    missing = [name for name in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"hosts as namespaces need {missing[0]}"
    kinds = ["--net", "--uts", "--pid", "--mount", "--fork"]
    trial = (
        "hostname trial && mount -t tmpfs tmpfs /tmp && ip link add trial0 type veth && ip link add trial1 type bridge"
    )
    made = subprocess.run(["unshare", *kinds, "sh", "-ec", trial], capture_output=True, text=True, check=False)
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else ""


@dataclass
class Guest:
    """A program that runs on a host; `pid` is its own, as this side counts."""

    outer: subprocess.Popen
    pid: int

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, timeout=None):
        """Return its exit code; negative for a signal."""
        return self.outer.wait(timeout)

    def poll(self):
        return self.outer.poll()


@dataclass
class Host:
    """One host: `name` is its host name and, on every host, resolves to `address`, its interface is eth0."""

    name: str
    number: int
    address: str
    init: subprocess.Popen
    switch: int
    """Process that holds the namespace of the bridge."""
    pid: int = 0
    relay: subprocess.Popen | None = None
    guests: list = field(default_factory=list)

    @property
    def port(self):
        """This host's port of the bridge."""
        return f"port{self.number}"

    def command(self, argv, cwd="/"):
        """Return the command that runs `argv` on this host from outside."""
        inner = f"cd {shlex.quote(str(cwd))} && exec {shlex.join(map(str, argv))}"
        return ["nsenter", "-t", str(self.pid), "--net", "--uts", "--pid", "--mount", "--", "sh", "-c", inner]

    def run(self, argv, *, cwd="/", timeout=60, check=True, **options):
        """Run a program to its end and return it, its output captured."""
        return subprocess.run(
            self.command(argv, cwd), capture_output=True, text=True, timeout=timeout, check=check, **options
        )

    def popen(self, argv, *, cwd="/", **options):
        """Start a program."""
        outer = subprocess.Popen(self.command(argv, cwd), **options)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        deadline = time.monotonic() + 60
        while not (found := children.read_text().split()) and outer.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        guest = Guest(outer, int(found[0]) if found else outer.pid)
        self.guests.append(guest)
        return guest

    def processes(self):
        """Return pid -> command line of all that runs here but its init, zombies left out."""
        space = Path(f"/proc/{self.pid}/ns/pid")
        mine, found = (space.readlink() if space.exists() else None), {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and mine is not None and int(entry.name) != self.pid:
                with contextlib.suppress(OSError):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if (entry / "ns" / "pid").readlink() == mine and state != "Z":
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
        return found

    def listening(self):
        """Return the (address, port) pairs on which something listens here, IPv4 and IPv6."""
        found = set()
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                rows = [line.split() for line in Path(f"/proc/{self.pid}/net/{name}").read_text().splitlines()[1:]]
                found |= {_address(row[1]) for row in rows if row[3] == "0A"}
        return found

    def crash(self):
        """Kill everything on this host at once; its sockets are closed by the kernel."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.init.wait(60)
        for guest in self.guests:
            guest.outer.wait(60)

    def power_off(self):
        """Take the link away, then kill everything: nobody hears of it."""
        self.cut()
        self.crash()

    def cut(self):
        """Take the link away."""
        _on(self.switch, "ip", "link", "set", self.port, "down")

    def restore(self):
        """Bring the link back."""
        _on(self.switch, "ip", "link", "set", self.port, "up")

    def limit(self, rate):
        """Limit the link in both directions to a `rate` of tc, such as "200mbit"."""
        shape = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]
        _on(self.switch, "tc", "qdisc", "replace", "dev", self.port, *shape)
        _on(self.pid, "tc", "qdisc", "replace", "dev", "eth0", *shape)

    def delay(self, milliseconds):
        """Delay every packet of the link by so much in each direction; call it before anything is connected."""
        _on(self.switch, "ip", "link", "del", self.port)
        argv = [sys.executable, RELAY, self.switch, self.port, self.pid, "eth0", milliseconds]
        self.relay = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *map(str, argv)], stdout=subprocess.PIPE, text=True
        )
        assert self.relay.stdout.readline() == "ready\n"
        _plug(self)


@contextlib.contextmanager
def hosts(count, *, shared=None, network="10.77.0"):
    """Make `count` hosts, yield them, and remove them and all that runs there.

    The folder `shared` is the same on all of them, as on a cluster with a file system of its own; /tmp is not. Their
    addresses are `network`.1, .2 and so on.
    """
    with contextlib.ExitStack() as stack:
        switch = _hold(stack, "--net")
        _on(switch, "ip", "link", "add", "bridge0", "type", "bridge", "forward_delay", "0")
        _on(switch, "ip", "link", "set", "bridge0", "up")
        addresses = [f"{network}.{number + 1}" for number in range(count)]
        yield [_make(stack, number, addresses, switch, shared) for number in range(count)]


def _make(stack, number, addresses, switch, shared):
    init = stack.enter_context(_process("--net", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"))
    host = Host(f"host{number}", number, addresses[number], init, switch)
    stack.callback(_remove, host)
    children = Path(f"/proc/{init.pid}/task/{init.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.002)
    host.pid = int(found[0])
    while Path(f"/proc/{host.pid}/comm").read_text() != "sleep\n":
        time.sleep(0.002)
    _on(switch, "ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
    _plug(host)
    names = "\n".join(["127.0.0.1 localhost", *(f"{address} host{other}" for other, address in enumerate(addresses))])
    kept = [shared] if shared else []
    if ROOT.is_relative_to("/tmp"):
        kept.append(ROOT)  # a checkout below what becomes the host's own /tmp
    places = [(shlex.quote(str(folder)), place) for folder, place in zip(kept, ("/mnt", "/media"), strict=False)]
    script = [
        "set -e",
        f"hostname {host.name}",
        "mount --make-rprivate /",
        *(f"mount --bind {folder} {place}" for folder, place in places),
        "mount -t tmpfs tmpfs /tmp",
        "mount -t tmpfs tmpfs /dev/shm",
        *(f"mkdir -p {folder} && mount --move {place} {folder}" for folder, place in places),
        f"printf '%s\\n' {shlex.quote(names)} > /tmp/hosts",
        ": > /tmp/resolv.conf",
        "mount --bind /tmp/hosts /etc/hosts",
        "mount --bind /tmp/resolv.conf /etc/resolv.conf",
    ]
    host.run(["sh", "-c", "\n".join(script)])
    return host


def _plug(host):
    """Give the host its address, and its end of the link to the bridge."""
    _on(host.switch, "ip", "link", "set", host.port, "master", "bridge0", "up")
    for argv in (
        ("ip", "link", "set", "lo", "up"),
        ("ip", "addr", "add", f"{host.address}/24", "dev", "eth0"),
        ("ip", "link", "set", "eth0", "up"),
    ):
        _on(host.pid, *argv)


def _remove(host):
    host.crash()
    if host.relay is not None:
        host.relay.kill()
        host.relay.wait()
        host.relay.stdout.close()


def _hold(stack, *spaces):
    """Start a process in namespaces of its own, and return its pid once it is there."""
    holder = stack.enter_context(_process(*spaces))
    while Path(f"/proc/{holder.pid}/comm").read_text() != "sleep\n":
        time.sleep(0.002)
    return holder.pid


@contextlib.contextmanager
def _process(*spaces):
    argv = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "sh", "-c", _INIT]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)  # unshare complains at its own end
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def _on(pid, *argv):
    """Run a command of the network in the namespace of process `pid`."""
    done = subprocess.run(["nsenter", "-t", str(pid), "--net", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (argv, done.stderr)


def _address(text):
    """Read an address of /proc/net/tcp: groups of four bytes in the machine's order."""
    address, port = text.split(":")
    raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
    if len(raw) == 4:
        return ".".join(map(str, raw)), int(port, 16)
    return ":".join(raw[i : i + 2].hex() for i in range(0, 16, 2)), int(port, 16)
