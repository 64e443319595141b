"""What `launch` is asked, and the sections that it shares with `train`: nodes, submission, hangs, replicas, device."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - msgspec reads the types of fields at run time
from typing import Annotated, ClassVar, Literal

import msgspec

from shardwise.engines.backends import backend_row
from shardwise.errors import LaunchError
from shardwise.launcher.slurm import read_directives
from shardwise.runs.drift import ReplicaSpec
from shardwise.spec import NonNegativeFloat, NonNegativeInt, Option, Spec, argument, option


class RendezvousSpec(Spec, frozen=True, kw_only=True):
    """torchrun's options about the nodes of a run and where they join it."""

    nnodes: str | None = None
    """Nodes: N, or MIN:MAX to continue with any number between them (default: 1)."""
    node_rank: int | None = None
    """Which node this is; the rendezvous is on node 0."""
    rdzv_backend: str = "static"
    """static, or c10d, where --node-rank may be left out."""
    rdzv_endpoint: Annotated[str, option("--rdzv-endpoint", metavar="HOST:PORT")] = ""
    """Address of the rendezvous: node 0."""
    rdzv_id: str = "none"
    """Name of the run, the same on all nodes."""
    rdzv_conf: str = ""
    """join_timeout=S,last_call_timeout=S: how long to wait for nodes."""
    master_addr: str | None = None
    """Host name or address of node 0."""
    master_port: int | None = None
    """Port of node 0 (default: 29500; on one node a free one)."""
    local_addr: str | None = None
    """Address of this node, where the route to node 0 does not give it."""


class SubmitSpec(Spec, frozen=True, kw_only=True):
    """Where else the command runs: as a SLURM job, on hosts over ssh, on Kubernetes."""

    slurm: Annotated[str | None, Option(metavar="KEY=VALUE,...", bare="")] = None
    """Submit the command to SLURM with these options of sbatch; inside an allocation, run it there."""
    hosts: Annotated[str | None, option(metavar="A,B:8|FILE")] = None
    """Run one node on each of these hosts, started over ssh."""
    kubernetes: Annotated[str | None, option(metavar="image=I,...")] = None
    """Print manifests that run the command on Kubernetes."""

    def __post_init__(self) -> None:
        """Refuse directives that cannot be read: a script in their place would be missed as the script otherwise."""
        super().__post_init__()
        if self.slurm is not None:
            read_directives(self.slurm)


class HangSpec(Spec, frozen=True, kw_only=True):
    """When ranks that others wait for are named, and what follows."""

    after_s: Annotated[NonNegativeFloat, option("--hang-after", metavar="SECONDS")] = 10.0
    """Name the ranks that others have waited for so long; 0 turns recording and detection off."""
    on_hang: Literal["report", "stop"] = "report"
    """After a verdict: continue, or stop all ranks."""

    @property
    def stops(self) -> bool:
        """Whether a verdict stops the ranks."""
        return self.on_hang == "stop"


class DeviceSpec(Spec, frozen=True, kw_only=True):
    """Where ranks compute, and which library their collectives use."""

    device: Literal["cpu", "cuda"] | None = None
    """Device of the ranks (default: cuda where there is one)."""
    backend: Annotated[str | None, option(metavar="NAME")] = None
    """gloo, nccl, mpi, ucc or cpu:gloo,cuda:nccl (default: by device)."""

    def __post_init__(self) -> None:
        """Write the backend in small letters; mpi carries tensors of the CPU alone."""
        super().__post_init__()
        if self.backend is None:
            return
        msgspec.structs.force_setattr(self, "backend", self.backend.lower())
        only = backend_row(self.backend).default_device
        if only is None:
            return
        if self.device not in (None, only):
            raise LaunchError(
                f"--device {self.device}, but --backend {self.backend} carries tensors of the CPU alone",
                code="world.backend-device-mismatch",
                fix="leave --device out, or use --backend nccl",
            )
        msgspec.structs.force_setattr(self, "device", only)


class LaunchSpec(Spec, frozen=True, kw_only=True):
    """A script on many processes, with torchrun's options."""

    command: ClassVar[str] = "launch"

    nproc: Annotated[str | int | None, option("--nproc-per-node", "--nproc")] = None
    """Processes of this node: a number, gpu, cpu or auto (default: 1)."""
    max_restarts: NonNegativeInt = 0
    """How often all ranks are started again after a failure."""
    standalone: bool = False
    """One node, any free port (the default)."""
    rendezvous: RendezvousSpec = RendezvousSpec()
    submit: SubmitSpec = SubmitSpec()
    role: str = "default"
    """Accepted because torchrun has it."""
    monitor_interval: float | None = None
    """Accepted because torchrun has it: exits are seen at once."""
    start_method: Literal["fork", "spawn"] = "fork"
    """fork shares one import of torch between all ranks."""
    grace_s: Annotated[NonNegativeFloat, option("--shutdown-timeout")] = 30.0
    """Seconds from a stop request to a kill."""
    preset: Annotated[str | None, option(metavar="NAME")] = None
    """Environment variables for a kind of cluster: gcp, infiniband, aws-efa, azure-nd ..."""
    run_dir: Annotated[Path | None, option("--log-dir", "--run-dir")] = None
    """Run directory (default: runs/NAME-TIME)."""
    redirects: Annotated[str | None, option("-r", "--redirects")] = None
    """Output to files only: 0-3 or RANK:N,...; 0 keeps the terminal."""
    tee: Annotated[str, option("-t", "--tee")] = "0"
    """Output to files and, after its rank, to the terminal: 0-3 or RANK:N,..."""
    local_ranks_filter: str = ""
    """Show only these ranks, such as 0,1."""
    module: Annotated[bool, option("-m", "--module")] = False
    """SCRIPT is a module, as with python -m."""
    no_python: bool = False
    """SCRIPT is any program."""
    hang: HangSpec = HangSpec()
    replicas: ReplicaSpec = ReplicaSpec()
    deterministic: bool = False
    """The same bits in every run; operations that cannot do that are refused."""
    dry_run: bool = False
    """Print what would run."""
    script: Annotated[str, argument("SCRIPT")]
    arguments: Annotated[tuple[str, ...], argument("[ARGUMENTS]...")] = ()

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        super().__post_init__()
        if self.module and self.no_python:
            raise LaunchError(
                "--module and --no-python contradict each other", code="cli.options-conflict", fix="use one of them"
            )
