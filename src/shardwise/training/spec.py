"""What `train` is asked (a job, a plan, when to save, how ranks are started), and what a training came to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from shardwise.errors import InputError
from shardwise.launcher.spec import DeviceSpec, HangSpec, RendezvousSpec, SubmitSpec
from shardwise.runs.directory import parse_keep
from shardwise.runs.drift import CHECK_EVERY, ReplicaSpec
from shardwise.spec import NonNegativeInt, PositiveInt, Spec, argument, option


class SaveSpec(Spec, frozen=True, kw_only=True):
    """How often checkpoints are saved, which of them stay, and what a run resumes from."""

    every: Annotated[NonNegativeInt, option("--save-every")] = 0
    """Steps between checkpoints; 0 saves only when the run is asked to stop."""
    keep: Annotated[str | int, option(metavar="RULES")] = "3"
    """Checkpoints that stay: a count (3), an age (12h, 2d), min:METRIC or max:METRIC, comma separated, or all."""
    must_save: bool = False
    """Fail when a checkpoint cannot be saved (default: report it and continue)."""
    resume: str = "auto"
    """A run directory or a checkpoint to resume from; auto takes the newest of this run directory, never none."""

    def __post_init__(self) -> None:
        """Refuse rules that cannot be read."""
        super().__post_init__()
        parse_keep(str(self.keep))

    def resolved(self) -> SaveSpec:
        """Return it with an absolute path to resume from; a path that holds no checkpoint is refused."""
        if self.resume in ("auto", "never"):
            return self
        path = Path(self.resume)
        if not (path / "manifest.json").exists() and not any((path / name).is_dir() for name in ("", "checkpoints")):
            raise InputError(
                f"--resume {self.resume} is neither a run directory nor a checkpoint",
                code="checkpoint.resume-not-found",
                fix="name one that exists",
            )
        return self.replace(resume=str(path.resolve()))


class TrainSpec(Spec, frozen=True, kw_only=True):
    """A described job on one or many processes."""

    command: ClassVar[str] = "train"

    job: Annotated[str, argument("JOB.py[:NAME]")]
    nproc: Annotated[PositiveInt | None, option("--nproc", "--nproc-per-node")] = None
    """Processes to start on this node (default: 1)."""
    plan: str = "auto"
    """auto, a preset, a product such as dp2.tp2, or a .toml file."""
    settings: Annotated[tuple[str, ...], option("--set", metavar="KEY=VALUE")] = ()
    """Override a field of the job or the plan."""
    run_dir: Path | None = None
    """Run directory (default: runs/NAME-TIME)."""
    save: SaveSpec = SaveSpec()
    max_restarts: NonNegativeInt = 0
    """How often the training is resumed after a failure."""
    rendezvous: RendezvousSpec = RendezvousSpec()
    submit: SubmitSpec = SubmitSpec()
    hang: HangSpec = HangSpec()
    replicas: ReplicaSpec = ReplicaSpec(every=CHECK_EVERY)
    deterministic: bool = False
    """The same bits in every run; operations that cannot do that are refused."""
    preset: Annotated[str | None, option(metavar="NAME")] = None
    """Environment variables for a kind of cluster, as launch has it: gcp, infiniband ..."""
    place: DeviceSpec = DeviceSpec()
    sinks: Annotated[tuple[str, ...], option("--sink", metavar="KIND:PLACE")] = ()
    """Mirror the run into a tracker from a process of its own: tensorboard:DIR, wandb:PROJECT or mlflow:EXPERIMENT."""


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a training came to."""

    steps: int
    """Of the whole training, those before `first_step` included."""
    first_step: int
    """Where this run began: 0, or the step of the checkpoint that it resumed from."""
    samples: int
    """Of the steps from `first_step` on."""
    skipped: int
    """Steps whose gradient was not finite, on which the update was skipped."""
    loss: float
    """Mean over the global batch of the last step."""
    evaluation: dict[str, float]
    """Loss and metrics over the whole test split after the last step; empty without one."""
    training_s: float
    """From the first step's start to the last step's end, evaluations included."""
    samples_per_s: float


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """When a run was started, and where each value of its plan came from."""

    started_at: float
    """Seconds since the epoch when the launcher began."""
    plan_sources: dict[str, str]
