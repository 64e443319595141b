"""What a drill runs: a described job, a few steps long, as `train` launches it, or a script as `launch` does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - the Spec reads its annotations
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from shardwise.diagnosis.drill.faults import KINDS, OF_JOBS, Kind
from shardwise.engines.engine import engine_named
from shardwise.errors import InputError
from shardwise.job import load_job
from shardwise.job.job import LENGTHS
from shardwise.launcher.local.attempts import LocalLaunch
from shardwise.launcher.local.target import Script, check_target
from shardwise.launcher.spec import DeviceSpec
from shardwise.parallel.support import require_supported
from shardwise.planner.settle import local_device, settle, split_settings
from shardwise.runner.local import PRELOAD, worker_launch, write_run_inputs
from shardwise.spec import NonNegativeFloat, Spec, argument, option
from shardwise.training.spec import SaveSpec, TrainSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.runs import RunDirectory

SAVES = 5
"""Checkpoints in a run: two before the fault, one that a full disk spoils, one that reports it, one after."""
_STEPS = 40


class DrillSpec(Spec, frozen=True, kw_only=True):
    """What `shardwise doctor drill` is asked."""

    job: Annotated[str, argument("JOB.py[:NAME]|SCRIPT.py")]
    arguments: Annotated[tuple[str, ...], argument("[ARGUMENTS]...")] = ()
    """Of a script."""
    drills: Annotated[tuple[Literal[Kind, "all"], ...], option("--drill")] = ()
    """Fault to inject; may be repeated (default: all)."""
    nproc: Annotated[int, msgspec.Meta(ge=2), option("--nproc", "--nproc-per-node")] = 2
    """Ranks."""
    plan: str | None = None
    """Of a job: auto, preset, product or .toml file (default: auto)."""
    settings: Annotated[tuple[str, ...], option("--set", metavar="KEY=VALUE")] = ()
    """Override a field of the job or the plan."""
    steps: Annotated[int, msgspec.Meta(ge=10)] | None = None
    """Of a job: optimizer steps of each run (default: 40)."""
    device: Literal["cpu", "cuda"] | None = None
    """Of a job (default: cuda where there is one)."""
    backend: str | None = None
    """Of a job: gloo, nccl or cpu:gloo,cuda:nccl (default: by device)."""
    hang_after: Annotated[NonNegativeFloat, option(metavar="SECONDS")] = 3.0
    """Seconds after which a rank that others wait for is reported; 0 reports no hang."""
    run_dir: Path | None = None
    """Folder that keeps all runs (default: a temporary one)."""
    script: bool = False
    """It is not a job: run it as launch does, with its arguments."""

    def kinds(self) -> list[Kind]:
        """Return the faults to inject, each once."""
        asked = [kind for kind in KINDS if kind in self.drills]
        for kind in asked:
            if self.script and kind in OF_JOBS:
                raise InputError(
                    f"--drill {kind} is about checkpoints of a job, and --script has its own",
                    code="cli.option-not-applicable",
                    fix="drill a job, or leave it out",
                )
        if asked and "all" not in self.drills:
            return asked
        return [kind for kind in KINDS if not self.script or kind not in OF_JOBS]


@dataclass(frozen=True, kw_only=True)
class DrillTarget:
    """What is drilled: a job of a known length, or a script."""

    name: str
    launch: Callable[[RunDirectory], LocalLaunch]
    """Writes the inputs of a run directory, and returns what is launched in it."""
    steps: int = 0
    """Optimizer steps of a job; 0 for a script."""

    @property
    def save_interval(self) -> int:
        """Steps between checkpoints."""
        return self.steps // SAVES


def make_target(spec: DrillSpec) -> DrillTarget:
    """Return the job or script of a Spec, checked; nothing has started yet."""
    return _script_target(spec) if spec.script else _job_target(spec)


def _job_target(spec: DrillSpec) -> DrillTarget:
    if spec.arguments:
        raise InputError(
            f"{spec.job} is a job and takes no argument {spec.arguments[0]!r}",
            code="cli.unexpected-argument",
            fix="put options before it, or add --script",
        )
    for text in spec.settings:
        if text.partition("=")[0].strip() in LENGTHS:
            raise InputError(
                f"--set {text} is the length of the job",
                code="doctor.drill-length-set",
                fix="use --steps for that of a drill",
            )
    steps = spec.steps or _STEPS
    reference, overrides = split_settings(spec.job, (*spec.settings, f"steps={steps}"))
    job = load_job(reference)
    purpose = "drills inject faults at steps of torch's optimizers"
    fix = "shardwise verify --resume kills and resumes it"
    engine_named(job.engine).require_torch_model(spec.job, purpose, fix=fix)
    device = local_device(spec.device, spec.nproc)
    plan = settle(
        spec.plan or "auto", batch_size=job.batch_size, world_size=spec.nproc, device=device, overrides=overrides
    )
    require_supported(plan)
    train = TrainSpec(
        job=spec.job,
        place=DeviceSpec(device=device.kind, backend=spec.backend),
        save=SaveSpec(every=steps // SAVES, resume="never"),
    )

    def launch(run: RunDirectory) -> LocalLaunch:
        write_run_inputs(run, reference, plan, started_at=time.time())
        return worker_launch(train, run, nproc=spec.nproc)

    return DrillTarget(name=reference.name, launch=launch, steps=steps)


def _script_target(spec: DrillSpec) -> DrillTarget:
    of_a_job = {
        "--plan": spec.plan,
        "--set": spec.settings,
        "--steps": spec.steps,
        "--device": spec.device,
        "--backend": spec.backend,
    }
    for flag, value in of_a_job.items():
        if value:
            raise InputError(
                f"{flag} is for a job, and --script says that {spec.job} is none",
                code="cli.option-not-applicable",
                fix="leave one of them out",
            )
    target = Script(spec.job, spec.arguments)
    check_target(target)
    local = LocalLaunch(target=target, nproc=spec.nproc, preload=PRELOAD)
    return DrillTarget(name=target.name, launch=lambda _: local)
