"""The program that a drill tests, a job or a script, and the entry point of its ranks, which arms the fault."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - the Spec reads its annotations
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from shardwise.diagnosis.drill.faults import JOB_KINDS, KINDS, Fault, Kind, arm
from shardwise.engines.engine import engine_named, require_supported
from shardwise.environment import identify
from shardwise.errors import InputError
from shardwise.job import load_job
from shardwise.job.job import LENGTHS
from shardwise.launcher.local.attempts import LocalLaunch
from shardwise.launcher.local.target import Module, Script, check_target, set_main
from shardwise.launcher.spec import DeviceSpec
from shardwise.planner.settle import local_device, settle, split_settings
from shardwise.runner.local import PRELOAD, worker_launch, write_run_inputs
from shardwise.spec import NonNegativeFloat, Spec, argument, option
from shardwise.training.spec import SaveSpec, TrainSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.runs import RunDirectory

SAVES = 5
"""Checkpoints per run: two before the fault, one that fails on a full disk, one that reports the failure, one after."""
_STEPS = 40


class DrillSpec(Spec, frozen=True, kw_only=True):
    """The request of `shardwise doctor drill`."""

    job: Annotated[str, argument("JOB.py[:NAME]|SCRIPT.py")]
    arguments: Annotated[tuple[str, ...], argument("[ARGUMENTS]...")] = ()
    """Arguments of a script."""
    drills: Annotated[tuple[Literal[Kind, "all"], ...], option("--drill")] = ()
    """Fault to inject; may be repeated (default: all)."""
    nproc: Annotated[int, msgspec.Meta(ge=2), option("--nproc", "--nproc-per-node")] = 2
    """Number of ranks."""
    plan: str | None = None
    """Plan of a job: auto, preset, product or .toml file (default: auto)."""
    settings: Annotated[tuple[str, ...], option("--set", metavar="KEY=VALUE")] = ()
    """Override a field of the job or the plan."""
    steps: Annotated[int, msgspec.Meta(ge=10)] | None = None
    """Optimizer steps of a job in each run (default: 40)."""
    device: Literal["cpu", "cuda"] | None = None
    """Device of a job (default: cuda if available)."""
    backend: str | None = None
    """Backend of a job: gloo, nccl or cpu:gloo,cuda:nccl (default: by device)."""
    hang_after: Annotated[NonNegativeFloat, option(metavar="SECONDS")] = 3.0
    """Seconds after which a rank that blocks other ranks is reported; 0 disables hang detection."""
    run_dir: Path | None = None
    """Directory of all runs (default: a temporary directory)."""
    script: bool = False
    """Run a script with its arguments, like launch, instead of a job."""

    def kinds(self) -> list[Kind]:
        """Return the faults to inject, without duplicates."""
        requested = [kind for kind in KINDS if kind in self.drills]
        for kind in requested:
            if self.script and kind in JOB_KINDS:
                raise InputError(
                    f"--drill {kind} requires the checkpoints of a job, but --script runs a script",
                    code="cli.option-not-applicable",
                    fix=f"remove --drill {kind}, or pass a job without --script",
                )
        if requested and "all" not in self.drills:
            return requested
        return [kind for kind in KINDS if not self.script or kind not in JOB_KINDS]


@dataclass(frozen=True, kw_only=True)
class DrillTarget:
    """The program under test: a job with a known number of steps, or a script."""

    name: str
    launch: Callable[[RunDirectory], LocalLaunch]
    """Writes the inputs of a run directory and returns the launch request for it."""
    steps: int = 0
    """Optimizer steps of a job; 0 for a script."""

    @property
    def save_interval(self) -> int:
        """The number of steps between checkpoints."""
        return self.steps // SAVES


def make_target(spec: DrillSpec) -> DrillTarget:
    """Check the job or script of `spec` and return it as a target, without starting a process."""
    return _script_target(spec) if spec.script else _job_target(spec)


def _job_target(spec: DrillSpec) -> DrillTarget:
    if spec.arguments:
        raise InputError(
            f"{spec.job} is a job and does not accept the argument {spec.arguments[0]!r}",
            code="cli.unexpected-argument",
            fix=f"put options before {spec.job}, or add --script to run it as a script",
        )
    for text in spec.settings:
        if text.partition("=")[0].strip() in LENGTHS:
            raise InputError(
                f"--set {text} sets the length of the job, which --steps sets in a drill",
                code="doctor.drill-length-set",
                fix="remove this --set and pass --steps",
            )
    steps = spec.steps or _STEPS
    reference, overrides = split_settings(spec.job, (*spec.settings, f"steps={steps}"))
    job = load_job(reference)
    purpose = "drills inject faults at steps of torch's optimizers"
    fix = "run shardwise verify --resume, which kills and resumes the job"
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
        write_run_inputs(run, reference, plan, spec=train, started_at=time.time())
        return worker_launch(train, run, nproc=spec.nproc)

    return DrillTarget(name=reference.name, launch=launch, steps=steps)


def _script_target(spec: DrillSpec) -> DrillTarget:
    job_options = {
        "--plan": spec.plan,
        "--set": spec.settings,
        "--steps": spec.steps,
        "--device": spec.device,
        "--backend": spec.backend,
    }
    for flag, value in job_options.items():
        if value:
            raise InputError(
                f"{flag} applies to a job, but --script runs {spec.job} as a script",
                code="cli.option-not-applicable",
                fix=f"remove {flag}, or remove --script",
            )
    target = Script(spec.job, spec.arguments)
    check_target(target)
    local = LocalLaunch(target=target, nproc=spec.nproc, preload=PRELOAD)
    return DrillTarget(name=target.name, launch=lambda _: local)


class DrillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fault and the program that the launcher passes to a rank of a drill."""

    fault: Fault
    target: Script | Module


def drill_target(fault: Fault, target: Script | Module) -> Module:
    """Return a module to launch in place of `target` that injects the fault and then runs `target`."""
    request = msgspec.json.encode(DrillRequest(fault=fault, target=target)).decode()
    return Module(__name__, (request,))


def main() -> None:
    """Run the rank that the environment variables describe; the request is the command-line argument."""
    request = msgspec.json.decode(sys.argv[1], type=DrillRequest)
    arm(request.fault, identify().rank)
    exec(set_main(request.target), sys.modules["__main__"].__dict__)  # noqa: S102 - running the script is the job


if __name__ == "__main__":
    main()
