"""A few steps under torch's profiler: which kernels take the time, what communication hides, and a trace to look at."""

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
"""Kernels that are named."""
_COMMUNICATION = ("nccl", "gloo:")
"""How names of NCCL's kernels and of gloo's work begin."""
_AROUND = ("c10d::", "_c10d_functional::", "autograd::engine", "torch::autograd::AccumulateGrad")
"""Operators on a CPU that hold others, or wait for communication."""
_TRACES = (".json", ".json.gz")


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """What to profile: so many steps, and where to leave the trace."""

    steps: int = 3
    trace: Path | None = None
    """One file; where there are several ranks, one for each beside it."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All calls of one kernel or operator, per step."""

    name: str
    calls: float
    seconds: float
    """Its own, without those of operators it calls."""
    communicates: bool


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Where the time of profiled steps went, in seconds per step; the profiler itself makes them slower."""

    kind: str
    """"kernels" of a GPU, or "operators" of a CPU."""
    steps: int
    seconds: float
    """From the start of one step to the start of the next."""
    compute_s: float
    """While something computed."""
    communication_s: float
    """While something was communicated."""
    exposed_s: float
    """Of that, while nothing computed."""
    top: tuple[Kernel, ...]
    """By their own time, longest first."""
    trace: str | None = None
    """Where the trace of this rank is."""

    @property
    def idle_s(self) -> float:
        """While nothing computed and nothing was communicated: the host was not quick enough, or waited for data."""
        return max(0.0, self.seconds - self.compute_s - self.exposed_s)


def check_trace_path(path: Path) -> None:
    """Refuse a path that no trace can be written to; call it before measuring."""
    if not path.name.endswith(_TRACES):
        raise InputError(
            f"--trace {path} is of no known kind",
            code="bench.trace-extension",
            fix="end its name with .json or .json.gz",
        )
    if not path.parent.is_dir():
        raise InputError(
            f"the folder {path.parent} of the trace does not exist",
            code="cli.output-folder-missing",
            fix=f"mkdir -p {path.parent}",
        )


def trace_path(path: Path, rank: int, num_files: int) -> Path:
    """Return the file of one rank: `path` itself where there is but one, else trace.rank0.json and so on."""
    if num_files == 1:
        return path
    ending = next(ending for ending in reversed(_TRACES) if path.name.endswith(ending))
    return path.with_name(f"{path.name.removesuffix(ending)}.rank{rank}{ending}")


def profiler_ranges() -> Ranges:
    """Return a listener of phases that shows them in the trace."""

    def begin(name: str) -> Any:
        entered = record_function(name)
        entered.__enter__()
        return entered

    return Ranges(begin, lambda entered: entered.__exit__(None, None, None))


def profile_steps(run: Callable[[], object], device: torch.device, *, steps: int, trace: Path | None) -> StepProfile:
    """Profile `steps` calls of `run`, after one more that starts the profiler; called on every rank at once."""
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
    """What a profiler saw, in seconds."""

    compute: Sequence[Interval]
    communication: Sequence[Interval]
    own: dict[str, tuple[int, float]]
    """Name -> calls and seconds of its own."""


def summarize(events: Iterable[Any], *, on_gpu: bool) -> _Summary:
    """Sort a profiler's events into compute and communication; ranges that only name what is inside are left out."""
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
    """Seconds of communication during which nothing computed."""
    return _length([*found.compute, *found.communication]) - _length(found.compute)


def _length(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total
