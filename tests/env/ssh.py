"""OpenSSH on hosts of namespaces: a server on each at port 22, and one key by which all let each other in.

    with servers(3, shared=tmp_path) as (launcher, a, b):
        launcher.run(["ssh", a.name, "hostname"])

Needs root, namespaces and OpenSSH's client and server (`why_not()` names what is missing). The user's ~/.ssh
is not seen, and the servers are not the machine's: everything dies with this process.
"""

import contextlib
import os
import pwd
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from env import namespaces

PROGRAMS = {"ssh": "openssh-client", "ssh-keygen": "openssh-client", "/usr/sbin/sshd": "openssh-server"}
"""Program -> the package of Debian that has it."""

SERVER = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
ClientAliveInterval 2
ClientAliveCountMax 3
"""

CLIENT = """
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
"""


def why_not():
    """Return in one line why OpenSSH cannot run on hosts here; empty when it can."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    return f"tests over ssh need Debian's {missing[0]}" if missing else namespaces.why_not()


@contextlib.contextmanager
def servers(count, *, shared):
    """Make `count` hosts that log into each other by key, host0 to hostN; yield and remove them."""
    folder = Path(shared) / "ssh"
    folder.mkdir()
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with namespaces.hosts(count, shared=shared) as made:
        known = [f"{host.name},{host.address} {(folder / 'host_key.pub').read_text()}" for host in made]
        (folder / "known_hosts").write_text("".join(known))
        (folder / "config").write_text(CLIENT.format(folder=folder))
        for host in made:
            _start(host, folder)
        for host in made:
            _wait_until_up(host)
        yield made


def left_on(host):
    """Return the command lines of all that runs on a host but the ssh server and its connections."""
    return [command for command in host.processes().values() if not command.startswith(("sshd:", "/usr/sbin/sshd"))]


def _start(host, folder):
    (folder / f"sshd_config.{host.name}").write_text(SERVER.format(address=host.address, folder=folder))
    home = shlex.quote(str(Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh"))  # ssh does not ask $HOME
    script = [
        "set -e",
        "mount -t tmpfs tmpfs /run",
        "mkdir -m 755 /run/sshd",
        f"if [ -d {home} ]; then mount -t tmpfs tmpfs {home}; fi",
        f"mount --bind {shlex.quote(str(folder / 'config'))} /etc/ssh/ssh_config",
    ]
    host.run(["sh", "-c", "\n".join(script)])
    with (folder / f"sshd.{host.name}.log").open("w") as log:
        argv = ["/usr/sbin/sshd", "-D", "-e", "-f", folder / f"sshd_config.{host.name}"]
        host.popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _wait_until_up(host):
    deadline = time.monotonic() + 60
    while (host.address, 22) not in host.listening():
        assert time.monotonic() < deadline, f"sshd of {host.name} does not listen"
        time.sleep(0.01)
