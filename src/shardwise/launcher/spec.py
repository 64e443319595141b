"""The Spec of `launch` and its sections, some shared with `train`: rendezvous, submission, hang detection, device."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - msgspec reads the types of fields at run time
from typing import Annotated, ClassVar, Literal

import msgspec

from shardwise.engines.backends import backend_row
from shardwise.errors import LaunchError
from shardwise.launcher.nodes.messages import LOST_S
from shardwise.launcher.slurm import read_directives
from shardwise.runs.drift import ReplicaSpec
from shardwise.spec import NonNegativeFloat, NonNegativeInt, Option, Spec, argument, option


class RendezvousSpec(Spec, frozen=True, kw_only=True):
    """torchrun's options for runs on several nodes: number of nodes, node rank and rendezvous endpoint."""

    nnodes: str | None = None
    """Number of nodes: N, or MIN:MAX for an elastic run (default: 1)."""
    node_rank: int | None = None
    """Rank of this node; node 0 runs the rendezvous."""
    rdzv_backend: str = "static"
    """static, or c10d, which does not require --node-rank."""
    rdzv_endpoint: Annotated[str, option("--rdzv-endpoint", metavar="HOST:PORT")] = ""
    """Address of the rendezvous: node 0."""
    rdzv_id: str = "none"
    """Run id, the same on all nodes."""
    rdzv_conf: str = ""
    """join_timeout=S,last_call_timeout=S: timeouts for nodes to join."""
    node_timeout_s: Annotated[float, msgspec.Meta(ge=2), option("--node-timeout", metavar="SECONDS")] = LOST_S
    """Seconds without a heartbeat after which a node is lost; node 0 decides."""
    master_addr: str | None = None
    """Host name or address of node 0."""
    master_port: int | None = None
    """Port of node 0 (default: 29500; on one node a free port)."""
    local_addr: str | None = None
    """Address of this node (default: that of the route to node 0)."""


class SubmitSpec(Spec, frozen=True, kw_only=True):
    """Where to submit the command: to SLURM, to hosts over ssh, or to Kubernetes."""

    slurm: Annotated[str | None, Option(metavar="KEY=VALUE,...", bare="")] = None
    """Submit the command to SLURM with these sbatch options; inside an allocation, run it there."""
    hosts: Annotated[str | None, option(metavar="A,B:8|FILE")] = None
    """Run one node on each of these hosts, started over ssh."""
    env: Annotated[tuple[str, ...], option("--env", metavar="NAME[=VALUE]")] = ()
    """With --hosts: set this environment variable on every host; without a value, to its value here."""
    kubernetes: Annotated[str | None, option(metavar="image=I,...")] = None
    """Print Kubernetes manifests that run the command."""

    def __post_init__(self) -> None:
        """Validate the directives first: "--slurm train.py" would parse the script as the value of --slurm."""
        super().__post_init__()
        if self.slurm is not None:
            read_directives(self.slurm)
        if self.env and self.hosts is None:
            raise LaunchError(
                f"--env {self.env[0].partition('=')[0]} requires --hosts",
                code="cli.option-not-applicable",
                fix="remove --env, and export the variable: ranks inherit the environment",
            )


class HangSpec(Spec, frozen=True, kw_only=True):
    """The hang detector: after which time it reports a hang, and whether it stops the ranks."""

    after_s: Annotated[NonNegativeFloat, option("--hang-after", metavar="SECONDS")] = 10.0
    """Report a hang if ranks wait this long for other ranks; 0 disables recording and hang detection."""
    on_hang: Literal["report", "stop"] = "report"
    """After a hang is reported: continue, or stop all ranks."""

    @property
    def stops(self) -> bool:
        """Whether a detected hang stops all ranks."""
        return self.on_hang == "stop"


class DeviceSpec(Spec, frozen=True, kw_only=True):
    """The device of the ranks and the backend of their collectives."""

    device: Literal["cpu", "cuda"] | None = None
    """Device of the ranks (default: cuda if available)."""
    backend: Annotated[str | None, option(metavar="NAME")] = None
    """gloo, nccl, mpi, ucc or cpu:gloo,cuda:nccl (default: by device)."""

    def __post_init__(self) -> None:
        """Convert the backend name to lowercase and check that the backend supports the device."""
        super().__post_init__()
        if self.backend is None:
            return
        msgspec.structs.force_setattr(self, "backend", self.backend.lower())
        only = backend_row(self.backend).default_device
        if only is None:
            return
        if self.device not in (None, only):
            raise LaunchError(
                f"--backend {self.backend} supports CPU tensors only, got --device {self.device}",
                code="world.backend-device-mismatch",
                fix="remove --device, or use --backend nccl",
            )
        msgspec.structs.force_setattr(self, "device", only)


class LaunchSpec(Spec, frozen=True, kw_only=True):
    """The request to run a script on several processes, with torchrun's options."""

    command: ClassVar[str] = "launch"

    nproc: Annotated[str | int | None, option("--nproc-per-node", "--nproc")] = None
    """Number of processes on this node: a number, gpu, cpu or auto (default: 1)."""
    max_restarts: NonNegativeInt = 0
    """Maximum number of restarts of all ranks after a failure."""
    standalone: bool = False
    """Run on one node with a free port (the default)."""
    rendezvous: RendezvousSpec = RendezvousSpec()
    submit: SubmitSpec = SubmitSpec()
    role: str = "default"
    """Ignored; accepted for compatibility with torchrun."""
    monitor_interval: float | None = None
    """Ignored, because exits are detected at once; accepted for compatibility with torchrun."""
    start_method: Literal["fork", "spawn"] = "fork"
    """fork: all ranks share one import of torch; spawn: each imports it."""
    grace_s: Annotated[NonNegativeFloat, option("--shutdown-timeout")] = 30.0
    """Seconds from SIGTERM to SIGKILL when ranks are stopped."""
    preset: Annotated[str | None, option(metavar="NAME")] = None
    """Environment variables for a type of cluster: gcp, infiniband, aws-efa, azure-nd ..."""
    run_dir: Annotated[Path | None, option("--log-dir", "--run-dir")] = None
    """Run directory (default: runs/NAME-TIME)."""
    redirects: Annotated[str | None, option("-r", "--redirects")] = None
    """Write output to files only: 0-3 or RANK:N,...; 0 uses the terminal."""
    tee: Annotated[str, option("-t", "--tee")] = "0"
    """Write output to files and, prefixed by the rank, to the terminal: 0-3 or RANK:N,..."""
    local_ranks_filter: str = ""
    """Display the output of these ranks only, such as 0,1."""
    module: Annotated[bool, option("-m", "--module")] = False
    """SCRIPT is a Python module, as in python -m."""
    no_python: bool = False
    """SCRIPT is an executable, not a Python file."""
    hang: HangSpec = HangSpec()
    replicas: ReplicaSpec = ReplicaSpec()
    deterministic: bool = False
    """Use deterministic algorithms; operations without one raise an error."""
    dry_run: bool = False
    """Print the resolved command without running it."""
    script: Annotated[str, argument("SCRIPT")]
    arguments: Annotated[tuple[str, ...], argument("[ARGUMENTS]...")] = ()

    def __post_init__(self) -> None:
        """Raise LaunchError if both --module and --no-python are set."""
        super().__post_init__()
        if self.module and self.no_python:
            raise LaunchError(
                "--module and --no-python are mutually exclusive", code="cli.options-conflict", fix="remove --module"
            )
