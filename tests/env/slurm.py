"""A real SLURM on hosts of namespaces: a controller, a slurmd on every node, and GPUs that are only device files.

    with cluster(2, shared=tmp_path, gpus=4) as slurm:
        slurm.run(["srun", "-N2", "hostname"])
        job = slurm.run(["sbatch", "--parsable", "train.sh"]).stdout.strip()
        slurm.wait(job, "COMPLETED")

Needs root, namespaces and Debian's slurmctld, slurmd and slurm-client (`why_not()` names what is missing). No munge,
systemd or accounting. Jobs are submitted from a host that is not a node. Everything dies with this process.
"""

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from env import namespaces

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
"""Program -> the package of Debian that has it."""

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000,batch_sched_delay=0
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir=/tmp/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 DefaultTime=10
"""


def why_not():
    """Return in one line why SLURM cannot run here; empty when it can."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        return f"tests of SLURM need Debian's {' '.join(missing)}"
    if not any(Path("/sys/fs/cgroup").iterdir()):
        return "tests of SLURM need something mounted on /sys/fs/cgroup"
    return namespaces.why_not()


@dataclass
class Cluster:
    """A SLURM that is up: `login` is where users are, `nodes` are host0, host1, ..."""

    nodes: list
    login: namespaces.Host
    folder: Path
    """Where its files are; jobs may write anywhere below its parent, which all hosts share."""

    @property
    def environ(self):
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, argv, *, cwd=None, check=True, timeout=150, **environ):
        """Run a program on the login host to its end, its output captured."""
        options = {"cwd": cwd or self.folder.parent, "check": False, "timeout": timeout}
        done = self.login.run(argv, env={**self.environ, **environ}, **options)
        assert done.returncode == 0 or not check, (argv, done.stdout, done.stderr)
        return done

    def popen(self, argv, *, cwd=None, environ=None, **options):
        """Start a program on the login host."""
        return self.login.popen(argv, cwd=cwd or self.folder.parent, env={**self.environ, **(environ or {})}, **options)

    def state(self, job):
        """Return the state of a job by SLURM's name."""
        shown = self.run(["scontrol", "--oneliner", "show", "job", job]).stdout
        return shown.partition("JobState=")[2].split()[0]

    def wait(self, job, *states, timeout=60):
        """Wait until a job is in one of the states, and return it."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {' or '.join(states)}"
            time.sleep(0.1)
        return state

    def start_again_soon(self, job, timeout=60):
        """Wait until a job is requeued, and spare it most of the two minutes that SLURM makes such jobs wait."""
        self.wait(job, "PENDING", timeout=timeout)
        # Not at once: nodes refuse a job that begins in the second in which it was ended.
        self.run(["scontrol", "update", f"jobid={job}", "StartTime=now+2"])

    def left_on_nodes(self):
        """Return the command lines of all that runs on the nodes but SLURM's own daemons."""
        return [
            command
            for node in self.nodes
            for command in node.processes().values()
            if not command.startswith(("slurmd", "slurmstepd", "slurmctld"))
        ]


@contextlib.contextmanager
def cluster(count, *, shared, gpus=0, cpus=4):
    """Bring up a SLURM of `count` nodes, yield it, and remove it with all its jobs.

    `shared` is a folder that all hosts see, and the current one of jobs. Each node has as many cores as configured.
    """
    folder = Path(shared) / "slurm"
    (folder / "state").mkdir(parents=True)
    with namespaces.hosts(count + 1, shared=shared) as (*nodes, login):
        made = Cluster(nodes, login, folder)
        _write_configuration(made, gpus, cpus)
        _start(login, ["slurmctld", "-D"], made)
        for node in nodes:
            _start(node, ["slurmd", "-D", "-N", node.name], made)
        _wait_until_idle(made, count)
        yield made


def _write_configuration(made, gpus, cpus):
    folder, nodes = made.folder, made.nodes
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    lines = [f"NodeName={node.name} NodeAddr={node.address} CPUs={cpus} RealMemory=4000{gres}" for node in nodes]
    text = CONFIGURATION.format(controller=made.login, folder=folder, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    devices = [folder / f"nvidia{number}" for number in range(gpus)]
    for number, device in enumerate(devices):
        subprocess.run(["mknod", device, "c", "195", str(number)], check=True)
    # The flag has SLURM set CUDA_VISIBLE_DEVICES though nothing asked the driver.
    names = f"NodeName={','.join(node.name for node in nodes)} Name=gpu"
    lines = [f"{names} File={device} Flags=nvidia_gpu_env\n" for device in devices]
    (folder / "gres.conf").write_text("".join(lines))


def _start(host, argv, made):
    with (made.folder / f"{argv[0]}.{host.name}.out").open("w") as log:
        host.popen(argv, env=made.environ, stdout=log, stderr=log)


def _wait_until_idle(made, count):
    deadline = time.monotonic() + 60
    while True:
        shown = made.run(["sinfo", "--noheader", "--Node", "--format=%T"], check=False).stdout.split()
        if shown == ["idle"] * count:
            return
        assert time.monotonic() < deadline, (shown, _logs(made.folder))
        time.sleep(0.05)


def _logs(folder):
    return "\n".join(path.read_text() for path in [*folder.glob("*.log"), *folder.glob("*.out")])
