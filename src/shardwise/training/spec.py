"""The Spec of `train` (job, plan, checkpointing, launch options) and its result."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - msgspec reads the annotations
from typing import Annotated, ClassVar

import msgspec

from shardwise.checkpoint.remote import RemoteCheckpoints, find_remote
from shardwise.data.storage.locations import check_url
from shardwise.errors import InputError
from shardwise.launcher.spec import DeviceSpec, HangSpec, RendezvousSpec, SubmitSpec
from shardwise.runs.directory import RunDirectory, parse_keep
from shardwise.runs.drift import CHECK_EVERY, ReplicaSpec
from shardwise.spec import NonNegativeInt, PositiveInt, Spec, argument, is_url, local_path, option


class SaveSpec(Spec, frozen=True, kw_only=True):
    """Checkpoint options: save interval, retention and the checkpoint to resume from."""

    every: Annotated[NonNegativeInt, option("--save-every")] = 0
    """Steps between checkpoints (default: 0, which saves only after a stop signal)."""
    keep: Annotated[str | int, option(metavar="RULES")] = "3"
    """Checkpoints to keep: a count (3), an age (12h, 2d), min:METRIC or max:METRIC, comma separated, or all."""
    must_save: bool = False
    """Fail when a checkpoint cannot be saved or uploaded (default: report it and continue)."""
    resume: str | None = None
    """A run directory, checkpoint or URL to resume from; auto continues the run that is in --run-dir or was uploaded to
    --upload, if there is one; never starts at step 0 (default: a new run; a restart resumes from the newest checkpoint
    of its run)."""
    upload: Annotated[str | None, option(metavar="URL")] = None
    """Copy each checkpoint to object storage while training continues, such as s3://BUCKET/RUN."""

    def __post_init__(self) -> None:
        """Reject retention rules that cannot be parsed, and URLs that are invalid or contain secrets."""
        super().__post_init__()
        parse_keep(str(self.keep))
        for url in (self.upload, self.resume if is_url(self.resume) else None):
            if url is not None:
                check_url(url)

    @property
    def upload_grace_s(self) -> float:
        """Seconds after a stop request that ranks have to upload the checkpoint, beside those to save it."""
        return 90.0 if self.upload is not None else 0.0

    @property
    def is_periodic(self) -> bool:
        """Whether checkpoints are saved during the run, at an interval or after evaluations."""
        return self.every > 0 or parse_keep(str(self.keep)).best > 0

    def resolved(self) -> SaveSpec:
        """Return the spec with an absolute `resume` path; raise InputError if the path is not a checkpoint or run."""
        if self.resume in (None, "auto", "never") or is_url(self.resume):
            return self
        path = local_path(str(self.resume))
        is_name = path.name in {"latest", "best"} and path.is_file()
        if not is_name and not any((path / name).is_dir() for name in ("", "checkpoints")):
            raise InputError(
                f"--resume {self.resume} is neither a run directory nor a checkpoint",
                code="checkpoint.resume-not-found",
                fix="pass an existing run directory or checkpoint",
            )
        return self.replace(resume=str(path.resolve()))

    def check_remote(self, run_dir: Path | None) -> None:
        """Check that checkpoints can be uploaded, and that the one to resume from exists, before a run is created.

        A new run is refused if its URL has the checkpoints of another one, as a run directory that is not empty is.
        """
        if is_url(self.resume):
            find_remote(str(self.resume))
        if self.upload is None:
            return
        remote = RemoteCheckpoints.of_run(self.upload)
        remote.check_access()
        continues = self.resume == "auto" or (run_dir is not None and RunDirectory(run_dir).checkpoints.exists())
        if continues or f"{self.resume}/".startswith(f"{self.upload.rstrip('/')}/"):
            return
        names = remote.newest_first()
        if names:
            raise InputError(
                f"--upload {self.upload} already has checkpoints, the newest {names[0]}",
                code="run.upload-not-empty",
                fix="continue that run with --resume auto, or choose another URL",
            )


class TrainSpec(Spec, frozen=True, kw_only=True):
    """The options of `shardwise train`, which trains a job on one or more processes."""

    command: ClassVar[str] = "train"

    job: Annotated[str, argument("JOB.py[:NAME]")]
    nproc: Annotated[PositiveInt | None, option("--nproc", "--nproc-per-node")] = None
    """Processes to start on this node (default: 1)."""
    plan: str = "auto"
    """auto, a preset, a product of axes such as dp2.tp2, or a .toml file."""
    tune: bool = True
    """Measurements of the plan auto on GPUs: before a long job, a few plans train some steps for at most 60 s, and the
    result is cached; --no-tune chooses by predictions alone."""
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
    dry_run: bool = False
    """Print the plan and the command of each node, or what would be submitted, without starting anything."""


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a training run."""

    steps: int
    """Number of completed optimizer steps, including steps of earlier runs."""
    first_step: int
    """Number of optimizer steps before this run: 0, or the step of the checkpoint that it resumed from."""
    samples: int
    """Number of samples on which this run trained."""
    skipped: int
    """Number of steps that were skipped because their gradient was not finite."""
    loss: float
    """Mean loss over the global batch of the last step."""
    evaluation: dict[str, float]
    """Loss and metrics over the whole test split after the last step; empty without a test split."""
    training_s: float
    """Seconds from the start of the first step to the end of the last step, including evaluations."""
    samples_per_s: float
    is_stopped: bool = False
    """Whether a callback stopped the training before its last step."""
    step_s: float | None = None
    """Median seconds of a step without evaluations and start-up; None for a run that is too short to measure."""
    peak_bytes: int | None = None
    """Peak memory of rank 0: allocated on its GPU, or resident on a CPU."""


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """The start time of a run, its options and the source of each value of its plan."""

    started_at: float
    """Start time of the launcher, in seconds since the epoch."""
    plan_sources: dict[str, str]
    options: tuple[str, ...] = ()
    """Options of the command, without the run directory and the checkpoint to resume from."""
