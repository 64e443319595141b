"""Profiles a few steps with torch.profiler: the longest kernels, exposed communication, and a trace file."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from shardwise.errors import InputError
from shardwise.measurement.timing import wait_for
from shardwise.training.step.step import Ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import torch

Interval = tuple[float, float]

TOP = 12
"""Maximum number of kernels in a report."""
_COMMUNICATION = ("nccl", "gloo:")
"""Prefixes of the names of NCCL's kernels and gloo's operations."""
_AROUND = ("c10d::", "_c10d_functional::", "autograd::engine", "torch::autograd::AccumulateGrad")
"""CPU operators that contain other operators or wait for communication."""
_TRACES = (".json", ".json.gz")


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """The number of steps to profile, and the path of the trace."""

    steps: int = 3
    trace: Path | None = None
    """Path of the trace; with several ranks, each rank inserts .rankN into the file name."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All calls of one kernel or operator, per step."""

    name: str
    calls: float
    seconds: float
    """Self time, without the operators that it calls."""
    communicates: bool


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The time of profiled steps, in seconds per step; the profiler itself slows them down."""

    kind: str
    """"kernels" of a GPU, or "operators" of a CPU."""
    steps: int
    seconds: float
    """Time from the start of one step to the start of the next."""
    compute_s: float
    """Time in which compute runs."""
    communication_s: float
    """Time in which communication runs."""
    exposed_s: float
    """Time in which communication runs and compute does not."""
    top: tuple[Kernel, ...]
    """Kernels by self time, longest first."""
    trace: str | None = None
    """Path of this rank's trace."""

    @property
    def idle_s(self) -> float:
        """Time with neither compute nor communication, because the host was too slow or waited for data."""
        return max(0.0, self.seconds - self.compute_s - self.exposed_s)


def check_trace_path(path: Path) -> None:
    """Raise InputError if a trace cannot be written to `path`; call this before measuring."""
    if not path.name.endswith(_TRACES):
        raise InputError(
            f"--trace must be a .json or .json.gz file, got {path}",
            code="bench.trace-extension",
            fix="use --trace trace.json",
        )
    if not path.parent.is_dir():
        raise InputError(
            f"the directory {path.parent} of the trace does not exist",
            code="cli.output-folder-missing",
            fix=f"run mkdir -p {path.parent}",
        )


def trace_path(path: Path, rank: int, num_files: int) -> Path:
    """Return the file of one rank: `path` itself for a single file, otherwise trace.rank0.json and so on."""
    if num_files == 1:
        return path
    ending = next(ending for ending in reversed(_TRACES) if path.name.endswith(ending))
    return path.with_name(f"{path.name.removesuffix(ending)}.rank{rank}{ending}")


def profiler_ranges() -> Ranges:
    """Return a listener that records phases as ranges in the trace."""

    def begin(name: str) -> Any:
        entered = record_function(name)
        entered.__enter__()
        return entered

    return Ranges(begin, lambda entered: entered.__exit__(None, None, None))


def profile_steps(run: Callable[[], object], device: torch.device, *, steps: int, trace: Path | None) -> StepProfile:
    """Profile `steps` calls of `run` after one warm-up call; call on every rank at the same time."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    seconds = 0.0
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=steps, repeat=1)) as profiler:
        run()
        wait_for(device)
        profiler.step()
        began = time.perf_counter()
        for number in range(steps):
            run()
            if number + 1 == steps:
                wait_for(device)
                seconds = time.perf_counter() - began
            profiler.step()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    found = summarize(profiler.events() or (), on_gpu=on_gpu)
    return StepProfile(
        kind="kernels" if on_gpu else "operators",
        steps=steps,
        seconds=seconds / steps,
        compute_s=_length(found.compute) / steps,
        communication_s=_length(found.communication) / steps,
        exposed_s=_exposed(found) / steps,
        top=tuple(
            Kernel(name=name, calls=calls / steps, seconds=own / steps, communicates=name.startswith(_COMMUNICATION))
            for name, (calls, own) in sorted(found.own.items(), key=lambda item: -item[1][1])[:TOP]
        ),
        trace=None if trace is None else str(trace),
    )


@dataclass(frozen=True, kw_only=True)
class _Summary:
    """Compute, communication and self times from the events of a profiler, in seconds."""

    compute: Sequence[Interval]
    communication: Sequence[Interval]
    own: dict[str, tuple[int, float]]
    """Name -> number of calls and self time."""


def summarize(events: Iterable[Any], *, on_gpu: bool) -> _Summary:
    """Split profiler events into compute and communication; user annotations are ignored."""
    compute: list[Interval] = []
    communication: list[Interval] = []
    own: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    device = "CUDA" if on_gpu else "CPU"
    for event in events:
        interval = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        seconds = interval[1] - interval[0]
        if event.name.startswith("gloo:"):
            communication.append(interval)
        elif event.device_type.name != device or event.is_user_annotation or event.name.startswith(_AROUND):
            continue
        elif on_gpu:
            (communication if event.name.startswith("nccl") else compute).append(interval)
        else:
            seconds = event.self_cpu_time_total / 1e6
            if "::" in event.name or "Compiled" in event.name:  # not autograd's Python functions, which may wait
                compute.append(interval)
        calls, so_far = own[event.name]
        own[event.name] = (calls + 1, so_far + seconds)
    return _Summary(compute=compute, communication=communication, own=dict(own))


def _exposed(found: _Summary) -> float:
    """Return the seconds of communication that do not overlap with compute."""
    return _length([*found.compute, *found.communication]) - _length(found.compute)


def _length(intervals: Iterable[Interval]) -> float:
    """Return the seconds that at least one of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total
