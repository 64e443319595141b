"""`shardwise plan`: what fits, what it costs, what to choose and why."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.run.console import complain, say
from shardwise.run.exitcodes import CHECK_FAILED, DONE

if TYPE_CHECKING:
    from shardwise.hardware.machine import Cluster
    from shardwise.plan.choose.search import Answer, Question
    from shardwise.plan.choose.subject import Subject

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(
    "plan", context_settings={"token_normalize_func": lambda token: token.replace("_", "-")}, no_args_is_help=True
)
@click.argument("model", metavar="MODEL|JOB.py[:NAME]")
@click.option(
    "--cluster",
    default="this",
    show_default=True,
    help="8xH100, 2xp4d.24xlarge, 4x8xA100-40GB, or this machine.",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples per step over all devices.")
@click.option("--length", type=click.IntRange(min=1), help="Tokens per sample of a published model.")
@click.option("--precision", type=click.Choice(["bf16", "fp16", "fp32", "fp64"]), help="Compute in this.")
@click.option("--lora", type=click.IntRange(min=1), metavar="RANK", help="Fine-tune a published model by adapters.")
@click.option("--catalogue", type=_FILE, help="Devices, links and nodes of your own, in TOML.")
@click.option("--calibrate", is_flag=True, help="First measure this machine, in under a minute.")
@click.option("--all", "every", is_flag=True, help="List every plan that was predicted.")
@click.option("--json", "as_json", is_flag=True, help="Write the answer as JSON to standard output.")
@click.option("--out", type=_FILE, help="Write the best plan here, for train --plan FILE.")
@click.option("--picture", type=_FILE, help="Draw memory and timeline here, as SVG.")
def command(
    *,
    model: str,
    cluster: str,
    batch_size: int | None,
    length: int | None,
    precision: str | None,
    lora: int | None,
    catalogue: Path | None,
    calibrate: bool,
    every: bool,
    as_json: bool,
    out: Path | None,
    picture: Path | None,
) -> int:
    """Choose a plan for a published MODEL, or for the Job in JOB.py, on a cluster."""
    from shardwise.hardware.cluster import parse_cluster
    from shardwise.plan.choose.search import search

    _check_folders({"--out": out, "--picture": picture})
    if calibrate:
        _calibrate()
    where = parse_cluster(cluster, catalogue)
    subject = _subject(model, where, batch_size=batch_size, length=length, precision=precision, lora=lora)
    question = _question(subject, where)
    answer = search(question)
    if as_json:
        import msgspec

        from shardwise.plan.choose.report import answer_data

        say(msgspec.json.format(msgspec.json.encode(answer_data(answer, every=every)), indent=1).decode())
    else:
        from shardwise.cli.plan_view import show_answer

        show_answer(answer, subject, every=every)
    if picture is not None:
        _draw(answer, picture)
    if answer.best is None:
        _explain_nothing(question, fixed=batch_size is not None or ".py" in model)
        return CHECK_FAILED
    if out is not None:
        _write(answer, subject, out)
    return DONE


def _check_folders(files: dict[str, Path | None]) -> None:
    from shardwise.errors import InputError

    for option, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{option} {path} is in a folder that is not there", fix="make the folder first")


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
    from shardwise.cli.describe import describe_job
    from shardwise.errors import InputError
    from shardwise.plan.choose.subject import job_subject, published_subject

    if ".py" not in model:
        return published_subject(
            model,
            cluster,
            batch_size=batch_size,
            length=length,
            precision=precision,  # type: ignore[arg-type]  # one of the choices above
            lora=lora,
        )
    for option, value in (("--length", length), ("--lora", lora)):
        if value is not None:
            raise InputError(f"{option} is for published models, and {model} is a job", fix="change the job's file")
    from shardwise.job import load_job, refer

    return job_subject(
        load_job(refer(model, {})),
        cluster,
        describe_job,
        batch_size=batch_size,
        precision=precision,  # type: ignore[arg-type]
    )


def _question(subject: Subject, cluster: Cluster) -> Question:
    from shardwise.hardware.calibration_file import calibration_for
    from shardwise.parallel.support import require_supported
    from shardwise.plan.choose.search import Question

    return Question(
        model=subject.model,
        cluster=cluster,
        calibration=calibration_for(cluster.node),
        batch_size=subject.batch_size,
        precision=subject.precision,
        optimizer=subject.optimizer,
        accepts=require_supported,
    )


def _draw(answer: Answer, path: Path) -> None:
    from shardwise.plan.choose.picture import draw
    from shardwise.plan.cost.time import TimeModel
    from shardwise.plan.cost.timeline import timeline

    question, best = answer.question, answer.best
    times = TimeModel(question.cluster, question.calibration, optimizer=question.optimizer)
    spans = timeline(times, question.model.for_plan(best.plan), best.plan) if best else []
    title = f"{question.model.plain.name} on {question.cluster.num_devices} x {question.cluster.device.name}"
    path.write_text(draw(answer, spans, title=title))


def _explain_nothing(question: Question, *, fixed: bool) -> None:
    """Say that nothing fits, and what would."""
    from shardwise.plan.choose.explain import room_in_words, smallest_cluster

    found = smallest_cluster(question, question.batch_size if fixed else None)
    name, cluster = question.model.plain.name, question.cluster
    fact = f"no plan of {name} fits on {cluster.num_devices} x {cluster.device.name}"
    if found is None:
        complain(f"shardwise: {fact} ({room_in_words(question)}): use a smaller batch, a shorter length or --lora")
        return
    wider, family = found
    complain(f"shardwise: {fact}: use --cluster {wider.num_devices}x{wider.device.name}, where {family} fits")


def _write(answer: Answer, subject: Subject, path: Path) -> None:
    from shardwise.plan.toml import plan_to_toml

    if answer.best is None:
        return
    source = f"shardwise plan {answer.question.model.plain.name} on {answer.question.cluster.describe()}"
    sources = {"layout": source, "precision": subject.precision_source}
    path.write_text(plan_to_toml(dataclasses.replace(answer.best.plan, sources=sources)))
