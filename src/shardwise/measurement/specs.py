"""`bench` as a function, and its Specs, one per measurement: all options with default and help; imports no torch."""

from __future__ import annotations

import importlib
from pathlib import Path  # noqa: TC003 - read at run time by msgspec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shardwise.engines.backends import backend_row
from shardwise.errors import InputError, LaunchError, nearest
from shardwise.spec import NonNegativeInt, PositiveInt, Spec, argument, option

if TYPE_CHECKING:
    from shardwise.measurement.report.write import BenchReport

Nproc = Annotated[PositiveInt | None, option("--nproc", "--nproc-per-node")]
Settings = Annotated[tuple[str, ...], option("--set", metavar="KEY=VALUE")]
JobFile = Annotated[str, argument("JOB.py[:NAME]")]


class PlaceSpec(Spec, frozen=True, kw_only=True):
    """Where ranks compute, and over which backend they communicate."""

    device: Literal["cpu", "cuda"] | None = None
    """Where to run (default: cuda where there is one)."""
    backend: Annotated[str | None, option(metavar="NAME")] = None
    """gloo, nccl, mpi or ucc (default: nccl on cuda, else gloo); gloo ranks may share a GPU, mpi ranks are on CPUs."""

    def __post_init__(self) -> None:
        """Write the backend in lower case; mpi, which carries tensors of the CPU, implies the device."""
        super().__post_init__()
        if self.backend is not None:
            msgspec.structs.force_setattr(self, "backend", self.backend.lower())
        row = backend_row(self.backend)
        if row.default_device is None:
            return
        if self.device not in (None, row.default_device):
            raise LaunchError(
                f"--device {self.device}, but --backend {row.name} carries tensors of the CPU alone",
                code="world.backend-device-mismatch",
                fix="leave --device out, or use --backend nccl",
            )
        msgspec.structs.force_setattr(self, "device", row.default_device)


class CommSpec(Spec, frozen=True, kw_only=True):
    """Which collectives to time and check, and on what."""

    collectives: Annotated[tuple[str, ...], argument("[COLLECTIVE]...")] = ()
    sizes: str = "1KiB:64MiB"
    """FIRST:LAST[:FACTOR], or a list with commas."""
    dtypes: str | None = None
    """Dtypes to time, with commas, or all (default: float32; all are checked)."""
    ops: str | None = None
    """Reduce operations to time, with commas, or all (default: SUM; all are checked)."""
    group: str = "world"
    """world, node, across, or an axis of --layout."""
    layout: str | None = None
    """How axes split the ranks, such as shard2.tp2."""
    root: NonNegativeInt = 0
    """Rank in its group."""
    also_async: Annotated[bool, option("--async")] = False
    """Time calls that are started and waited for, too."""
    seconds: Annotated[float, msgspec.Meta(ge=0.1)] = 20.0
    """About how long to measure."""
    nproc: Nproc = None
    """Processes to start (default: one a GPU, 2 on a CPU)."""
    place: PlaceSpec = PlaceSpec()
    compare: Path | None = None
    """JSON of an earlier run; what is slower is named."""


class P2pSpec(Spec, frozen=True, kw_only=True):
    """What to measure between all pairs of ranks."""

    nproc: Nproc = None
    """Processes to start, at least two."""
    ways: Annotated[tuple[Literal["send", "isend", "batch"], ...], option("--way")] = ()
    """How to send (default: all three)."""
    size: str | None = None
    """Of a large message, such as 4MiB (default: 1MiB on CPUs, 16MiB on GPUs)."""
    small: str = "8"
    """Bytes of the message that latency is measured with."""
    together: bool = False
    """Measure disjoint pairs at the same time, to see what they share."""
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 20.0
    """About how long."""
    place: PlaceSpec = PlaceSpec()


class OverlapSpec(Spec, frozen=True, kw_only=True):
    """Which job, plan and settings of communication to measure."""

    job: JobFile
    plan: str = "auto"
    """auto, preset, product or .toml file."""
    nproc: Nproc = None
    """Processes to start (default: 1)."""
    buckets: Annotated[str | None, option(metavar="MB,MB")] = None
    """Sizes of DDP's buckets (default: 1,5,25,100)."""
    prefetch: Annotated[str | None, option(metavar="N,N")] = None
    """FSDP's blocks gathered ahead (default: 1,2,4)."""
    rounds: PositiveInt = 3
    """Times to build each setting."""
    settings: Settings = ()
    """Override a field of the job or the plan."""
    place: PlaceSpec = PlaceSpec()


class ScalingSpec(Spec, frozen=True, kw_only=True):
    """Which job or script to measure, and on how many ranks."""

    ranks: Annotated[str | None, option(metavar="N,N")] = None
    """Numbers of ranks (default: powers of two up to --nproc)."""
    nproc: Nproc = None
    """Most processes to start (default: GPUs, else cores)."""
    mode: Literal["strong", "weak"] | None = None
    """Which scaling (default: a job's both)."""
    rounds: PositiveInt = 3
    """Times to start each number."""
    plan: str | None = None
    """Of a job: preset, product or .toml file, refitted (default: ddp)."""
    settings: Settings = ()
    """Override a field of the job or the plan."""
    place: PlaceSpec = PlaceSpec()
    pattern: Annotated[str | None, option(metavar="REGEX")] = None
    """Of a script: finds its throughput in its output, by one group."""
    script: Annotated[str, argument("JOB.py[:NAME]|SCRIPT.py")]
    arguments: Annotated[tuple[str, ...], argument("[ARGUMENTS]...")] = ()


class StepPlaceSpec(PlaceSpec, frozen=True, kw_only=True):
    """Where ranks compute; several may share the first GPU."""

    device: Literal["cpu", "cuda", "cuda:0"] | None = None  # type: ignore[assignment]
    """Where to run (default: cuda where there is one); ranks share cuda:0."""


class StepSpec(Spec, frozen=True, kw_only=True):
    """Which job and plan to run for a few steps."""

    job: JobFile
    plan: str = "auto"
    """auto, preset, product or .toml file."""
    nproc: Nproc = None
    """Processes to start (default: 1)."""
    fake_world: PositiveInt | None = None
    """Run one rank of so many; the others are fake."""
    rank: NonNegativeInt = 0
    """Which rank of a fake world."""
    steps: PositiveInt = 5
    """Steps to measure."""
    settings: Settings = ()
    """Override a field of the job or the plan."""
    place: StepPlaceSpec = StepPlaceSpec()
    profile: bool = False
    """Also name the kernels that take the time."""
    trace: Path | None = None
    """Write a trace for Perfetto, .json or .json.gz."""


# `bench` as a function: the name of a measurement and its options in, its report out.


_PARTS: dict[str, tuple[type[Spec], str]] = {
    "comm": (CommSpec, "shardwise.measurement.comm.report"),
    "p2p": (P2pSpec, "shardwise.measurement.p2p.findings"),
    "overlap": (OverlapSpec, "shardwise.measurement.overlap_report"),
    "scaling": (ScalingSpec, "shardwise.measurement.scaling_report"),
    "step": (StepSpec, "shardwise.measurement.step_findings"),
}
"""Name -> Spec, and the module whose `measure` answers it: imported when it is used, since all need torch."""


def bench(part: str | Spec, *arguments: Any, **options: Any) -> BenchReport | None:
    """Measure communication or steps: `bench("comm", nproc=2)`, or one of the Specs of `shardwise.measurement.specs`.

    `part` is comm, p2p, overlap, scaling or step; options are those of the command. Returns None on ranks other than 0
    of a world that torchrun, srun or `shardwise launch` has started.
    """
    if isinstance(part, str):
        if part not in _PARTS:
            raise InputError(f"bench has no part {part!r}", code="bench.unknown-part", fix=nearest(part, _PARTS))
        spec: Spec = _PARTS[part][0].of(*arguments, **options)
    else:
        spec = part
    for kind, module in _PARTS.values():
        if type(spec) is kind:
            report: BenchReport | None = importlib.import_module(module).measure(spec)
            return report
    raise InputError(
        f"{type(spec).__name__} is not a Spec of bench",
        code="bench.unknown-part",
        fix=f"use one of {', '.join(kind.__name__ for kind, _ in _PARTS.values())}",
    )
