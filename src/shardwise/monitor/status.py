"""What a view says of a run at one moment: plain frozen values, for a terminal, a page or a program."""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Something worth telling that happened in a run."""

    number: int
    """Counts the entries of a run."""
    at: float
    """Seconds since the epoch."""
    kind: str
    text: str
    mood: str = "plain"
    """"plain", "good", "warn" or "bad"."""
    rank: int | None = None


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as far as its records tell."""

    rank: int
    host: str = ""
    device: str = ""
    pid: int | None = None
    phase: str = ""
    since: float | None = None
    """When that phase began, in seconds since the epoch."""
    step: int | None = None
    lag_s: float | None = None
    """For so long the first rank has been further than this one."""
    lag_steps: int | None = None
    memory_bytes: float | None = None
    """Highest so far: allocated on its GPU, else resident on the host."""
    state: str = "running"
    """"running", "done", "failed", "stopped" or "gone"."""
    words: str = ""
    """How it ended, if it did."""


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was begun, and whether it is there now."""

    step: int
    at: float
    num_bytes: int | None = None
    """On disk, all ranks together; None while it is not whole or gone."""


class RestartMark(msgspec.Struct, frozen=True, kw_only=True):
    """A restart of all ranks, and the step from which they went on."""

    step: int
    at: float


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    name: str
    path: str
    job: str
    plan: str
    state: str
    """"running", "finished", "failed", "stopped", "lost" (its launcher is gone) or "silent" (no sign of life)."""
    verdict: str
    """Why it failed, in one sentence."""
    now: float
    """Seconds since the epoch; of the last sign of life when the run is over."""
    began_at: float | None
    step: int
    num_steps: int | None
    epoch: int | None
    loss: float | None
    samples_per_s: float | None
    lr: float | None
    eta_s: float | None
    memory_bytes: float | None
    """Of the rank that needed most so far."""
    memory_rank: int | None
    is_resident: bool
    """Whether memory is what a process holds on the host, libraries and all; else what it allocated on its GPU."""
    predicted_bytes: float | None
    """Of tensors, of the rank that needs most."""
    prediction: str
    """Why nothing is predicted, or empty."""
    parameters: int | None
    restarts: int
    restart_marks: tuple[RestartMark, ...]
    evaluation: dict[str, float | None]
    """Of the last evaluation, by name."""
    checkpoints: tuple[CheckpointStatus, ...]
    ranks: tuple[RankStatus, ...]
    reading: float
    """Share of what was on disk at first that is folded in: 1.0 when the view has seen it all once."""
