"""`shardwise plan`: what fits, what it costs, what to choose and why."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.doctor import say_json
from shardwise.errors import InputError
from shardwise.planner.job_plan import describe_job, job_rules
from shardwise.runs.console import CHECK_FAILED, DONE, complain

if TYPE_CHECKING:
    from shardwise.hardware.machine import Cluster
    from shardwise.planner.search.deepspeed import ZeroForm
    from shardwise.planner.search.search import Answer, Question
    from shardwise.planner.search.subject import Subject
    from shardwise.plans.plan import Plan

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(
    "plan", context_settings={"token_normalize_func": lambda token: token.replace("_", "-")}, no_args_is_help=True
)
@click.argument("model", metavar="MODEL|JOB.py[:NAME]|PLAN.toml", required=False)
@click.option(
    "--cluster",
    default="this",
    show_default=True,
    help="8xH100, 2xp4d.24xlarge, 4x8xA100-40GB, or this machine.",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples per step over all devices.")
@click.option("--length", type=click.IntRange(min=1), help="Tokens per sample of a published model.")
@click.option("--precision", type=click.Choice(["bf16", "fp16", "fp32", "fp64"]), help="Compute in this.")
@click.option(
    "--engine",
    type=click.Choice(["torch", "deepspeed"]),
    default="torch",
    show_default=True,
    help="deepspeed: beside the plans of torch, which of its stages and offloads to take.",
)
@click.option("--lora", type=click.IntRange(min=1), metavar="RANK", help="Fine-tune a published model by adapters.")
@click.option("--catalogue", type=_FILE, help="Devices, links and nodes of your own, in TOML.")
@click.option("--calibrate", is_flag=True, help="First measure this machine, in under a minute.")
@click.option("--all", "every", is_flag=True, help="List every plan that was predicted.")
@click.option("--json", "as_json", is_flag=True, help="Write the answer as JSON to standard output.")
@click.option("--out", type=_FILE, help="Write the best plan here, for train --plan FILE.")
@click.option("--picture", type=_FILE, help="Draw memory and timeline here, as SVG.")
@click.option("--to-deepspeed", "to_json", type=_FILE, help="Write the plan here as JSON for deepspeed.initialize.")
@click.option("--from-deepspeed", "from_json", type=_FILE, help="Read this DeepSpeed JSON into a plan, for --out.")
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks, where a DeepSpeed JSON does not tell.")
def command(
    *,
    model: str | None,
    cluster: str,
    batch_size: int | None,
    length: int | None,
    precision: str | None,
    engine: str,
    lora: int | None,
    catalogue: Path | None,
    calibrate: bool,
    every: bool,
    as_json: bool,
    out: Path | None,
    picture: Path | None,
    to_json: Path | None,
    from_json: Path | None,
    nproc: int | None,
) -> int:
    """Choose a plan for a published MODEL, or for the Job in JOB.py, on a cluster."""
    from shardwise.hardware.cluster import parse_cluster
    from shardwise.planner.search.search import search

    _check_folders({"--out": out, "--picture": picture, "--to-deepspeed": to_json})
    if _translated(model, out, to_json, from_json, nproc=nproc, batch_size=batch_size, precision=precision):
        return DONE
    model = _required(model)
    if calibrate:
        _calibrate()
    where = parse_cluster(cluster, catalogue)
    subject = _subject(model, where, batch_size=batch_size, length=length, precision=precision, lora=lora)
    question = _question(subject, where)
    answer = search(question)
    forms = _forms(question) if engine == "deepspeed" else ()
    _present(answer, forms, subject, every=every, as_json=as_json)
    if picture is not None:
        _draw(answer, picture)
    best = _best(answer, forms)
    if best is None:
        _explain_nothing(question, fixed=batch_size is not None or ".py" in model)
        return CHECK_FAILED
    if out is not None:
        _write(best, answer, subject, out)
    if to_json is not None:
        from shardwise.cli.plan_deepspeed import best_for_deepspeed, write_deepspeed

        plan = best if engine == "deepspeed" else best_for_deepspeed(answer)
        write_deepspeed(plan, to_json, clip_norm=_clip_norm(model), has_job=".py" in model)
    return DONE


def _forms(question: Question) -> tuple[ZeroForm, ...]:
    from shardwise.planner.search.deepspeed import deepspeed_forms

    return deepspeed_forms(question)


def _present(answer: Answer, forms: tuple[ZeroForm, ...], subject: Subject, *, every: bool, as_json: bool) -> None:
    """Show what was found, on the terminal or as JSON."""
    if as_json:
        from shardwise.planner.search.report import answer_data

        say_json(answer_data(answer, forms, every=every))
    else:
        from shardwise.cli.plan_deepspeed import show_answer

        show_answer(answer, forms, subject, every=every)


def _best(answer: Answer, forms: tuple[ZeroForm, ...]) -> Plan | None:
    """Return the plan to take with the engine that was asked for; None where none fits."""
    from shardwise.planner.search.deepspeed import choose_form

    if not forms:
        return answer.best.plan if answer.best else None
    chosen = choose_form(forms)
    return chosen.best.plan if chosen and chosen.best else None


def _translated(
    model: str | None,
    out: Path | None,
    to_json: Path | None,
    from_json: Path | None,
    *,
    nproc: int | None,
    batch_size: int | None,
    precision: str | None,
) -> bool:
    """Whether it was a plan file or a DeepSpeed JSON to be written as the other, with nothing to search."""
    from shardwise.cli.plan_deepspeed import read_deepspeed, write_deepspeed
    from shardwise.plans.toml import read_plan

    if from_json is None and nproc is not None:
        raise InputError("--nproc is for --from-deepspeed", code="cli.option-not-applicable", fix="give --cluster")
    if from_json is not None:
        if model is not None or to_json is not None:
            other = model or f"--to-deepspeed {to_json}"
            raise InputError(
                f"--from-deepspeed searches nothing, and {other} is given too",
                code="cli.options-conflict",
                fix="leave one out",
            )
        read_deepspeed(from_json, out, num_ranks=nproc, batch_size=batch_size, precision=precision)  # type: ignore[arg-type]  # one of the choices above
        return True
    if model is None or not model.endswith(".toml"):
        return False
    if to_json is None:
        raise InputError(
            f"{model} is a plan already",
            code="plan.already-a-plan",
            fix="give --to-deepspeed, or name a model or a job",
        )
    write_deepspeed(read_plan(Path(model)), to_json, clip_norm=None, has_job=False)
    return True


def _required(model: str | None) -> str:
    if model is None:
        raise InputError(
            "nothing to plan is named",
            code="plan.nothing-named",
            fix="name a published model, a job, or --from-deepspeed FILE",
        )
    return model


def _clip_norm(model: str) -> float | None:
    """Return what the job clips to; a published model has no job."""
    from shardwise.job import load_job, refer

    return load_job(refer(model, {})).clip_norm if ".py" in model else None


def _check_folders(files: dict[str, Path | None]) -> None:
    for option, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise InputError(
                f"{option} {path} is in a folder that is not there",
                code="cli.output-folder-missing",
                fix="make the folder first",
            )


def _calibrate() -> None:
    """Measure this machine; plans for its kind of device use the figures from now on."""
    from shardwise.bench.calibrate import calibrate

    calibration = calibrate()
    complain(f"shardwise: measured {calibration.device.name} on {calibration.machine}")


def _subject(
    model: str,
    cluster: Cluster,
    *,
    batch_size: int | None,
    length: int | None,
    precision: str | None,
    lora: int | None,
) -> Subject:
    """Load the job, or find the published model."""
    from shardwise.parallel.support import require_supported
    from shardwise.planner.search.subject import job_subject, published_subject

    if ".py" not in model:
        return published_subject(
            model,
            cluster,
            accepts=require_supported,
            batch_size=batch_size,
            length=length,
            precision=precision,  # type: ignore[arg-type]  # one of the choices above
            lora=lora,
        )
    for option, value in (("--length", length), ("--lora", lora)):
        if value is not None:
            raise InputError(
                f"{option} is for published models, and {model} is a job",
                code="cli.option-not-applicable",
                fix="change the job's file",
            )
    from shardwise.job import load_job, refer
    from shardwise.job.engine import engine_of

    job = load_job(refer(model, {}))
    if engine_of(job) == "mlx":
        raise InputError(
            f"the model of {model} is MLX's, and nothing is predicted of those: MLX trains replicas alone",
            code="support.mlx-model",
            fix="shardwise train it, with --nproc 2 for two of them",
        )
    return job_subject(
        job,
        cluster,
        describe_job,
        accepts=job_rules(job),
        batch_size=batch_size,
        precision=precision,  # type: ignore[arg-type]
    )


def _question(subject: Subject, cluster: Cluster) -> Question:
    from shardwise.hardware.calibration import calibration_for
    from shardwise.planner.search.search import Question

    return Question(
        model=subject.model,
        cluster=cluster,
        calibration=calibration_for(cluster.node),
        batch_size=subject.batch_size,
        precision=subject.precision,
        optimizer=subject.optimizer,
        accepts=subject.accepts,
    )


def _draw(answer: Answer, path: Path) -> None:
    from shardwise.planner.cost.time import TimeModel, timeline
    from shardwise.planner.search.report import draw

    question, best = answer.question, answer.best
    times = TimeModel(question.cluster, question.calibration, optimizer=question.optimizer)
    spans = timeline(times, question.model.for_plan(best.plan), best.plan) if best else []
    title = f"{question.model.plain.name} on {question.cluster.num_devices} x {question.cluster.device.name}"
    path.write_text(draw(answer, spans, title=title))


def _explain_nothing(question: Question, *, fixed: bool) -> None:
    """Say that nothing fits, and what would."""
    from shardwise.planner.search.explain import room_in_words, smallest_cluster

    found = smallest_cluster(question, question.batch_size if fixed else None)
    name, cluster = question.model.plain.name, question.cluster
    fact = f"no plan of {name} fits on {cluster.num_devices} x {cluster.device.name}"
    if found is None:
        complain(f"shardwise: {fact} ({room_in_words(question)}): use a smaller batch, a shorter length or --lora")
        return
    wider, family = found
    complain(f"shardwise: {fact}: use --cluster {wider.num_devices}x{wider.device.name}, where {family} fits")


def _write(plan: Plan, answer: Answer, subject: Subject, path: Path) -> None:
    from shardwise.plans.toml import plan_to_toml

    source = f"shardwise plan {answer.question.model.plain.name} on {answer.question.cluster.describe()}"
    sources = {"layout": source, "precision": subject.precision_source}
    path.write_text(plan_to_toml(dataclasses.replace(plan, sources=sources)))
