"""`plan`: from what is asked (PlanSpec) to what fits, what it costs and what to take (PlanReport).

The way: a published model or the traced model of a job (`search/subject.py`), every layout with its micro-batches
(`search/search.py`), memory and time of each (`cost/`), reasons (`search/explain.py`), and the report's forms
(`search/report.py`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path  # noqa: TC003 - read at run time by Spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shardwise.engines.engine import engine_named
from shardwise.errors import InputError
from shardwise.hardware.cluster import parse_cluster
from shardwise.planner.cost.time import timeline
from shardwise.planner.search.deepspeed import choose_form
from shardwise.planner.search.explain import capacity_text, reason, smallest_cluster
from shardwise.planner.search.report import answer_data, answer_text, draw
from shardwise.planner.search.search import Rejected, search
from shardwise.planner.search.subject import job_subject, published_subject
from shardwise.plans.toml import plan_to_toml
from shardwise.runs.console import CHECK_FAILED
from shardwise.spec import PositiveInt, Report, Spec, argument, option, signature_of

if TYPE_CHECKING:
    from shardwise.hardware.machine import Cluster
    from shardwise.job import Job
    from shardwise.planner.search.deepspeed import ZeroForm
    from shardwise.planner.search.search import Answer, Candidate, Question
    from shardwise.planner.search.subject import Subject
    from shardwise.plans.plan import Plan


class PlanSpec(Spec, frozen=True, kw_only=True):
    """What is planned: a model, a cluster, a batch."""

    model: Annotated[str | None, argument("MODEL|JOB.py[:NAME]|PLAN.toml")] = None
    """A published model, or the file of a job."""
    cluster: str = "this"
    """8xH100, 2xp4d.24xlarge, 4x8xA100-40GB, or this machine."""
    batch_size: PositiveInt | None = None
    """Samples per step over all devices."""
    length: PositiveInt | None = None
    """Tokens per sample of a published model."""
    precision: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    """Compute in this."""
    engine: Literal["torch", "deepspeed"] = "torch"
    """deepspeed: its ZeRO stages and offloads as well, and which of them to take."""
    lora: Annotated[PositiveInt | None, option("--lora", metavar="RANK")] = None
    """Fine-tune a published model by adapters."""
    catalogue: Path | None = None
    """Devices, links and nodes of your own, in TOML."""
    every: Annotated[bool, option("--all")] = False
    """List every plan that was predicted."""

    @property
    def is_job(self) -> bool:
        """Whether the model is that of a job's file."""
        return self.model is not None and ".py" in self.model


class PlanReport(Report, frozen=True, kw_only=True):
    """Every plan that fits with what it costs, why the others do not, and the one to take."""

    spec: PlanSpec
    subject: Subject
    answer: Answer
    forms: tuple[ZeroForm, ...] = ()
    """DeepSpeed's stages and offloads, where that engine was asked for."""
    advice: str = ""
    """What to change where nothing fits."""

    @property
    def best(self) -> Plan | None:
        """The plan to take with the engine that was asked for; None where none fits."""
        chosen = choose_form(self.forms)
        candidate = chosen.best if chosen is not None else self.answer.best
        if candidate is None or (self.forms and chosen is None):
            return None
        question = self.answer.question
        source = f"shardwise plan {question.model.plain.name} on {question.cluster.describe()}"
        sources = {"layout": source, "precision": self.subject.precision_source}
        return dataclasses.replace(candidate.plan, sources=sources)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every plan that was predicted in full, the best first."""
        return self.answer.candidates

    @property
    def rejected(self) -> dict[str, str]:
        """Families of plans that cannot be used -> why."""
        families = self.answer.families.items()
        return {name: reason(self.answer, name) for name, entry in families if isinstance(entry, Rejected)}

    def to_json(self) -> str:
        """Return all that was found, in bytes and seconds, as indented JSON."""
        data = answer_data(self.answer, self.forms, every=self.spec.every)
        return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()

    def to_text(self) -> str:
        """Return the best of each family (or every plan), what the chosen one costs and why it was chosen."""
        return answer_text(self.answer, self.forms, self.subject, every=self.spec.every)

    def note(self) -> str:
        """Return that nothing fits and what would, where it is so."""
        return f"shardwise: {self.advice}" if self.advice else ""

    def to_svg(self) -> str:
        """Return memory by part of each family, and the timeline of a step of the best plan, as a picture."""
        question, best = self.answer.question, self.answer.best
        spans = timeline(question.time_model(), question.model.for_plan(best.plan), best.plan) if best else []
        title = f"{question.model.plain.name} on {question.cluster.num_devices} x {question.cluster.device.name}"
        return draw(self.answer, spans, title=title)

    def to_toml(self) -> str:
        """Return the best plan as a plan file."""
        if self.best is None:
            raise InputError("no plan fits", code="plan.none-fits", fix=self.advice)
        return plan_to_toml(self.best)


def plan(model: Job | PlanSpec | str, **options: Any) -> PlanReport:
    """Predict memory and time of every plan for a model on a cluster, and choose one.

    `model` is a Job, the name of a published model, the path of a job's file, or a whole PlanSpec; other options are
    the fields of PlanSpec: `sw.plan("llama-7b", cluster="8xH100")`.
    """
    if isinstance(model, PlanSpec):
        spec, job = model, None
    elif isinstance(model, str):
        spec, job = PlanSpec.of(model, **options), None
    else:
        spec, job = PlanSpec.of(**options), model
    cluster = parse_cluster(spec.cluster, spec.catalogue)
    subject = _subject(spec, job, cluster)
    question = subject.question(cluster)
    answer = search(question)
    forms = engine_named(spec.engine).plan_forms(question)
    report = PlanReport(spec=spec, subject=subject, answer=answer, forms=forms)
    if report.best is not None:
        return report
    is_fixed = spec.batch_size is not None or spec.is_job or job is not None
    advice = _advice(question, batch_is_fixed=is_fixed)
    return msgspec.structs.replace(report, advice=advice, exit_code=CHECK_FAILED)


plan.__signature__ = signature_of(PlanSpec, PlanReport)  # type: ignore[attr-defined]  # each option with its default


def _subject(spec: PlanSpec, job: Job | None, cluster: Cluster) -> Subject:
    """Return the model of the job, loaded where a file was named, or the published model."""
    if job is None and spec.model is None:
        raise InputError(
            "nothing to plan is named",
            code="plan.nothing-named",
            fix="name a published model, a job, or --from-deepspeed FILE",
        )
    if job is None and not spec.is_job:
        return published_subject(
            spec.model or "",
            cluster,
            batch_size=spec.batch_size,
            length=spec.length,
            precision=spec.precision,
            lora=spec.lora,
        )
    owner = spec.model or "the job"
    for name, value in (("--length", spec.length), ("--lora", spec.lora)):
        if value is not None:
            raise InputError(
                f"{name} is for published models, and {owner} is a job",
                code="cli.option-not-applicable",
                fix="change the job's file",
            )
    return job_subject(
        job or load_named_job(spec), cluster, batch_size=spec.batch_size, precision=spec.precision, owner=owner
    )


def load_named_job(spec: PlanSpec) -> Job:
    """Return the job of the file that a Spec names."""
    from shardwise.job import load_job, refer  # job files import torch

    return load_job(refer(spec.model or "", {}))


def _advice(question: Question, *, batch_is_fixed: bool) -> str:
    """Return that nothing fits, and what would."""
    found = smallest_cluster(question, question.batch_size if batch_is_fixed else None)
    name, cluster = question.model.plain.name, question.cluster
    fact = f"no plan of {name} fits on {cluster.num_devices} x {cluster.device.name}"
    if found is None:
        return f"{fact} ({capacity_text(question)}): use a smaller batch, a shorter length or --lora"
    wider, family = found
    return f"{fact}: use --cluster {wider.num_devices}x{wider.device.name}, where {family} fits"
