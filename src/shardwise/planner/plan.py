"""`plan`: from a PlanSpec to a PlanReport with the plans that fit, their memory and time, and the best one.

The steps: a published model or the traced model of a job (`search/subject.py`), every layout with its micro-batches
(`search/search.py`), memory and time of each (`cost/`), reasons (`search/explain.py`), and the output as text, JSON and
picture (`search/report.py`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path  # noqa: TC003 - Spec needs it at run time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shardwise.engines.engine import engine_named
from shardwise.errors import InputError
from shardwise.hardware.cluster import parse_cluster
from shardwise.job import load_job, refer
from shardwise.planner.cost.time import timeline
from shardwise.planner.history import MachineHistory, corrected, read_history, with_memory_margin
from shardwise.planner.search.explain import capacity_text, reason, smallest_cluster
from shardwise.planner.search.nearby import search_within
from shardwise.planner.search.report import answer_data, answer_text, draw
from shardwise.planner.search.search import Rejected, choose_form
from shardwise.planner.search.subject import job_subject, published_subject
from shardwise.plans.toml import plan_to_toml
from shardwise.runs.console import CHECK_FAILED
from shardwise.spec import PositiveInt, Report, Spec, argument, option, signature_of

if TYPE_CHECKING:
    from shardwise.hardware.machine import Cluster
    from shardwise.job import Job
    from shardwise.planner.search.search import Answer, Candidate, EngineForm, Question
    from shardwise.planner.search.subject import Subject
    from shardwise.plans.plan import Plan


class PlanSpec(Spec, frozen=True, kw_only=True):
    """Options of `shardwise plan`: a model, a cluster and a batch size."""

    model: Annotated[str | None, argument("MODEL|JOB.py[:NAME]|PLAN.toml")] = None
    """A published model, or the file of a job."""
    cluster: str = "this"
    """Cluster such as 8xH100, 2xp4d.24xlarge or 4x8xA100-40GB; `this` is this machine, `2xthis` two of its GPUs, or two
    ranks on its CPU."""
    batch_size: PositiveInt | None = None
    """Samples per step over all devices."""
    length: PositiveInt | None = None
    """Tokens per sample of a published model."""
    precision: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    """Compute dtype."""
    engine: Literal["torch", "deepspeed"] = "torch"
    """Engine; with deepspeed, the planner also predicts DeepSpeed's ZeRO stages and offloads, and chooses one."""
    lora: Annotated[PositiveInt | None, option("--lora", metavar="RANK")] = None
    """Fine-tune a published model with LoRA adapters."""
    catalogue: Path | None = None
    """TOML file with your own devices, links and nodes."""
    history: bool = True
    """Correct predictions by your own runs on the same devices; --no-history uses predictions alone."""
    every: Annotated[bool, option("--all")] = False
    """List every plan that was predicted."""

    @property
    def is_job(self) -> bool:
        """Whether the model is the file of a job."""
        return self.model is not None and ".py" in self.model


class PlanReport(Report, frozen=True, kw_only=True):
    """The plans that fit, with predicted memory and time; the best plan; and the reasons why other plans do not fit."""

    spec: PlanSpec
    subject: Subject
    answer: Answer
    forms: tuple[EngineForm, ...] = ()
    """ZeRO stages and offloads of DeepSpeed, with `engine="deepspeed"`."""
    advice: str = ""
    """Error message with the smallest change after which a plan fits; empty if one fits."""
    num_damaged: int = 0
    """Damaged lines in the history of runs on this machine, which were skipped."""

    @property
    def best(self) -> Plan | None:
        """The best plan for the engine of the spec; None if none fits."""
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
        """Every plan with a full prediction, the fastest first."""
        return self.answer.candidates

    @property
    def rejected(self) -> dict[str, str]:
        """Reasons why families of plans cannot be used, by family."""
        families = self.answer.families.items()
        return {name: reason(self.answer, name) for name, entry in families if isinstance(entry, Rejected)}

    def to_json(self) -> str:
        """Return the report as indented JSON, in bytes and seconds."""
        data = answer_data(self.answer, self.forms, every=self.spec.every)
        return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()

    def to_text(self) -> str:
        """Return the best plan of each family (or every plan), and the cost of the chosen plan with reasons."""
        return answer_text(self.answer, self.forms, self.subject, every=self.spec.every)

    def note(self) -> str:
        """Return the advice if no plan fits, and the number of damaged lines in the history; empty without either."""
        notes = [f"shardwise: {self.advice}"] if self.advice else []
        if self.num_damaged:
            notes.append(f"note      {self.num_damaged} damaged lines in the history of runs were skipped")
        return "\n".join(notes)

    def to_svg(self) -> str:
        """Return an SVG with the memory of each family by kind, and the timeline of one step of the best plan."""
        question, best = self.answer.question, self.answer.best
        spans = timeline(question.time_model(), question.model.for_plan(best.plan), best.plan) if best else []
        title = f"{question.model.plain.name} on {question.cluster.num_devices} x {question.cluster.device.name}"
        return draw(self.answer, spans, title=title)

    def to_toml(self) -> str:
        """Return the best plan as a plan file."""
        if self.best is None:
            raise InputError("no plan fits into device memory", code="plan.none-fits", fix=self.advice)
        return plan_to_toml(self.best)


def plan(model: Job | PlanSpec | str, **options: Any) -> PlanReport:
    """Predict memory and time of every plan for a model on a cluster, and choose one.

    `model` is a Job, the name of a published model, the path of a job's file, or a PlanSpec; the options are the fields
    of PlanSpec: `sw.plan("llama-7b", cluster="8xH100")`.
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
    history = read_history(cluster) if spec.history else MachineHistory()
    question = with_memory_margin(question, history)
    answer = corrected(search_within(question), history)
    forms = engine_named(spec.engine).plan_forms(question)
    report = PlanReport(spec=spec, subject=subject, answer=answer, forms=forms, num_damaged=history.num_damaged)
    if report.best is not None:
        return report
    is_fixed = spec.batch_size is not None or spec.is_job or job is not None
    advice = _advice(question, batch_is_fixed=is_fixed)
    return msgspec.structs.replace(report, advice=advice, exit_code=CHECK_FAILED)


plan.__signature__ = signature_of(PlanSpec, PlanReport)  # type: ignore[attr-defined]  # each option with its default


def _subject(spec: PlanSpec, job: Job | None, cluster: Cluster) -> Subject:
    """Return the model of the job, loaded from its file if necessary, or the published model."""
    if job is None and spec.model is None:
        raise InputError(
            "plan requires a model",
            code="plan.nothing-named",
            fix="pass a published model, a job, or --from-deepspeed FILE",
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
                f"{name} is valid for published models only, but {owner} is a job",
                code="cli.option-not-applicable",
                fix="remove the option, and change the job file",
            )
    return job_subject(
        job or load_named_job(spec), cluster, batch_size=spec.batch_size, precision=spec.precision, owner=owner
    )


def load_named_job(spec: PlanSpec) -> Job:
    """Return the job in the file `spec.model`."""
    return load_job(refer(spec.model or "", {}))


def _advice(question: Question, *, batch_is_fixed: bool) -> str:
    """Return the message that no plan fits, with the smallest change after which one fits."""
    found = smallest_cluster(question, question.batch_size if batch_is_fixed else None)
    name, cluster = question.model.plain.name, question.cluster
    fact = f"no plan of {name} fits on {cluster.num_devices} x {cluster.device.name}"
    if found is None:
        return f"{fact} ({capacity_text(question)}): use a smaller batch, a shorter length or --lora"
    wider, family = found
    return f"{fact}: use --cluster {wider.num_devices}x{wider.device.name}, where {family} fits"
