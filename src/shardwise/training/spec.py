"""The Spec of `train` (job, plan, checkpointing, launch options) and its result."""

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
    """Checkpoint options: save interval, retention and the checkpoint to resume from."""

    every: Annotated[NonNegativeInt, option("--save-every")] = 0
    """Steps between checkpoints; 0 saves only after a stop signal."""
    keep: Annotated[str | int, option(metavar="RULES")] = "3"
    """Checkpoints to keep: a count (3), an age (12h, 2d), min:METRIC or max:METRIC, comma separated, or all."""
    must_save: bool = False
    """Fail when a checkpoint cannot be saved (default: report it and continue)."""
    resume: str = "auto"
    """A run directory or checkpoint to resume from; auto is the newest checkpoint of this run, never disables it."""

    def __post_init__(self) -> None:
        """Reject retention rules that cannot be parsed."""
        super().__post_init__()
        parse_keep(str(self.keep))

    def resolved(self) -> SaveSpec:
        """Return the spec with an absolute `resume` path; raise InputError if the path is not a checkpoint or run."""
        if self.resume in ("auto", "never"):
            return self
        path = Path(self.resume)
        if not (path / "manifest.json").exists() and not any((path / name).is_dir() for name in ("", "checkpoints")):
            raise InputError(
                f"--resume {self.resume} is neither a run directory nor a checkpoint",
                code="checkpoint.resume-not-found",
                fix="pass an existing run directory or checkpoint",
            )
        return self.replace(resume=str(path.resolve()))


class TrainSpec(Spec, frozen=True, kw_only=True):
    """The options of `shardwise train`: a job on one or many processes."""

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
    """Number of times the training is restarted from its newest checkpoint after a failure."""
    rendezvous: RendezvousSpec = RendezvousSpec()
    submit: SubmitSpec = SubmitSpec()
    hang: HangSpec = HangSpec()
    replicas: ReplicaSpec = ReplicaSpec(every=CHECK_EVERY)
    deterministic: bool = False
    """Make runs bitwise reproducible; nondeterministic operations raise an error."""
    preset: Annotated[str | None, option(metavar="NAME")] = None
    """Preset of environment variables for a kind of cluster, as in launch: gcp, infiniband ..."""
    place: DeviceSpec = DeviceSpec()
    sinks: Annotated[tuple[str, ...], option("--sink", metavar="KIND:PLACE")] = ()
    """Mirror the run into a tracker from a separate process: tensorboard:DIR, wandb:PROJECT or mlflow:EXPERIMENT."""


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a training run."""

    steps: int
    """Optimizer steps that are done, including those before `first_step`."""
    first_step: int
    """Optimizer steps done before this run: 0, or the step of the checkpoint it resumed from."""
    samples: int
    """Samples trained by this run, that is, since `first_step`."""
    skipped: int
    """Steps that were skipped because their gradient was not finite."""
    loss: float
    """Mean loss over the global batch of the last step."""
    evaluation: dict[str, float]
    """Loss and metrics over the whole test split after the last step; empty without a test split."""
    training_s: float
    """Seconds from the start of the first step to the end of the last one, including evaluations."""
    samples_per_s: float
    is_stopped: bool = False
    """Whether a callback stopped the training before its last step."""


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """The start time of a run and the source of each value of its plan."""

    started_at: float
    """Start time of the launcher, in seconds since the epoch."""
    plan_sources: dict[str, str]
