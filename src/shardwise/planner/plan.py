"""`plan`: from a PlanSpec to a PlanReport with the plans that fit, their memory and time, and the best one.

The steps: a published model, a config.json or the traced model of a job (`search/subject.py`), every layout with its
micro-batches (`search/search.py`), memory and time of each (`cost/`), the user's own plan (`asked.py`), reasons
(`search/explain.py`), hints (`search/advice.py`), and the output as text, JSON, picture and page (`search/report.py`,
`search/page.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.engines.engine import engine_named
from shardwise.errors import InputError
from shardwise.hardware.cluster import parse_cluster
from shardwise.job import load_job
from shardwise.planner.asked import HEADER, Asked, predict_asked, to_plan_file
from shardwise.planner.cost.time import timeline
from shardwise.planner.history import MachineHistory, corrected, corrected_candidate, read_history, with_memory_margin
from shardwise.planner.next_step import Budget, budget_of, read_tokens, train_command, train_file_command
from shardwise.planner.own_plan import OwnOptions, is_searched_again, plan_settings, with_compile
from shardwise.planner.search.advice import LARGEST, Hint, best_plan, changes_that_fit, cluster_option, hints
from shardwise.planner.search.capacity import capacity_text
from shardwise.planner.search.engine_forms import choose_form
from shardwise.planner.search.explain import asked_verdict, reason
from shardwise.planner.search.page import draw, to_page
from shardwise.planner.search.report import to_text
from shardwise.planner.search.report_data import ReportContent, to_data
from shardwise.planner.search.search import Rejected, search
from shardwise.planner.search.sizes import best_size, search_fewer
from shardwise.planner.search.subject import job_subject, published_subject
from shardwise.planner.settle import split_settings
from shardwise.planner.spec import (
    PlanSpec,
    check_batch,
    check_engine_settings,
    check_length,
    check_options,
    of_plan_file,
)
from shardwise.plans.toml import read_plan
from shardwise.runs.console import CHECK_FAILED
from shardwise.spec import Report, signature_of

if TYPE_CHECKING:
    from shardwise.hardware.machine import Cluster
    from shardwise.job import Job
    from shardwise.planner.search.engine_forms import EngineForm
    from shardwise.planner.search.question import FixedFields, Question
    from shardwise.planner.search.search import Answer, Candidate
    from shardwise.planner.search.subject import Subject
    from shardwise.plans.plan import Plan


SHORTEST = 256
"""Tokens per sample below which no shorter length is proposed."""


class PlanReport(Report, frozen=True, kw_only=True):
    """The plans that fit, with predicted memory and time; the best plan; and the reasons why other plans do not fit."""

    spec: PlanSpec
    subject: Subject
    answer: Answer
    forms: tuple[EngineForm, ...] = ()
    """ZeRO stages and offloads of DeepSpeed, with `engine="deepspeed"`."""
    asked: Asked | None = None
    """The user's own plan, if the spec names one."""
    sizes: tuple[Answer, ...] = ()
    """Results for other numbers of devices, with `max_gpus`."""
    hints: tuple[Hint, ...] = ()
    """Other batch sizes and numbers of devices that are clearly better."""
    job_settings: tuple[str, ...] = ()
    """The --set options of the job."""
    advice: str = ""
    """Error message with the smallest change after which a plan fits; empty if one fits."""
    out: str = ""
    """The file to which the caller writes `to_toml`, which the next command names."""
    num_damaged: int = 0
    """Damaged lines in the history of runs on this machine, which were skipped."""

    @property
    def best(self) -> Plan | None:
        """The best plan for the engine of the spec; None if none fits."""
        candidate = self._recommended
        if candidate is None:
            return None
        question = self.answer.question
        source = f"shardwise plan {question.model.plain.name} on {question.cluster.describe()}"
        sources = {"layout": source, "precision": self.subject.precision_source}
        return dataclasses.replace(candidate.plan, sources=sources)

    @property
    def _recommended(self) -> Candidate | None:
        chosen = choose_form(self.forms)
        if self.forms:
            return chosen.best if chosen is not None else None
        return self.answer.best

    @property
    def chosen(self) -> Plan | None:
        """The plan that `to_toml` writes: the user's own, if the spec names one and it fits, else the best."""
        if self.asked is not None:
            return self.asked.plan if self.asked.fits else None
        return self.best

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every plan with a full prediction, the fastest first."""
        return self.answer.candidates

    @property
    def rejected(self) -> dict[str, str]:
        """Reasons why families of plans cannot be used, by family."""
        families = self.answer.families.items()
        return {name: reason(self.answer, name) for name, entry in families if isinstance(entry, Rejected)}

    @property
    def budget(self) -> Budget | None:
        """Time and cost of the whole training under the chosen plan; None if its length is unknown or no plan fits."""
        candidate = self.asked.candidate if self.asked is not None else self._recommended
        if candidate is None:
            return None
        tokens = None if self.spec.tokens is None else read_tokens(self.spec.tokens)
        per_sample = self.answer.question.model.plain.tokens_per_sample
        return budget_of(
            candidate,
            per_sample,
            num_gpus=self.answer.question.cluster.num_devices + self.answer.num_idle,
            tokens=tokens,
            num_steps=self.subject.num_steps,
            price=self.spec.price,
        )

    @property
    def next_command(self) -> str:
        """The command to run next: `train`, or for a model whose plan is in no file yet, `plan` with --out.

        Empty if no plan fits.
        """
        cluster = self.answer.question.cluster
        if self.chosen is None or self.spec.model is None:
            return ""
        if self.spec.is_job:
            return train_command(self.spec.model, self.chosen, cluster, self.job_settings)
        is_unchanged = self.spec.plan.endswith(".toml") and not self.spec.settings and self.spec.compile is None
        path = self.out or (self.spec.plan if is_unchanged else "")
        if path:
            return train_file_command(path, cluster)
        options, arguments = self.spec.to_argv()
        separate = itertools.chain.from_iterable(option.split("=", 1) for option in options)
        return shlex.join(["shardwise", "plan", *arguments, *separate, "--out", "plan.toml"])

    @property
    def _shown(self) -> ReportContent:
        return ReportContent(
            answer=self.answer,
            subject=self.subject,
            forms=self.forms,
            asked=self.asked,
            sizes=self.sizes,
            hints=self.hints,
            budget=self.budget,
            next_command=self.next_command,
            every=self.spec.every,
        )

    def to_json(self) -> str:
        """Return the report as indented JSON, in bytes and seconds."""
        return msgspec.json.format(msgspec.json.encode(to_data(self._shown)), indent=2).decode()

    def to_text(self) -> str:
        """Return the best plan of each family (or every plan), and the cost of the chosen plan with reasons."""
        return to_text(self._shown)

    def note(self) -> str:
        """Return the advice if no plan fits, why the user's own plan cannot be used, and damage of the history."""
        notes = []
        is_refused = self.asked is not None and self.asked.candidate is None
        if self.advice and not is_refused:
            notes.append(f"shardwise: {self.advice}")
        elif self.asked is not None and not self.asked.fits:
            verdict = asked_verdict(self.asked, self.answer)
            notes.append(f"shardwise: plan {self.asked.plan.layout} cannot be used: {verdict}")
        if self.num_damaged:
            notes.append(f"note      {self.num_damaged} damaged lines in the history of runs were skipped")
        return "\n".join(notes)

    def to_svg(self) -> str:
        """Return an SVG with the memory of each family by kind, and the timeline of one step of the best plan."""
        question, best = self.answer.question, self.answer.best
        spans = timeline(question.time_model(), question.model.for_plan(best.plan), best.plan) if best else []
        title = f"{question.model.plain.name} on {question.cluster.num_devices:,} x {question.cluster.device.name}"
        return draw(self.answer, spans, title=title)

    def to_html(self) -> str:
        """Return a self-contained HTML page with memory, the timeline of a step for each family, and reasons."""
        return to_page(self._shown)

    def to_toml(self) -> str:
        """Return the chosen plan as a plan file, which names the model and the cluster in comments."""
        plan = self.chosen
        if plan is None:
            fix = self.advice or "change the plan, or remove --plan"
            raise InputError("no plan fits into device memory", code="plan.none-fits", fix=fix)
        origin = {name: getattr(self.spec, name) for name in HEADER}
        return to_plan_file(plan, origin | {"cluster": cluster_option(self.answer.question.cluster)})


def plan(model: Job | PlanSpec | str, **options: Any) -> PlanReport:
    """Predict memory and time of every plan for a model on a cluster, and choose one.

    `model` is a Job, the name of a published model, a config.json, the path of a job's file or of a plan file, or a
    PlanSpec; the options are the fields of PlanSpec: `sw.plan("llama-7b", cluster="8xH100")`.
    """
    if isinstance(model, PlanSpec):
        spec, job = model, None
    elif isinstance(model, str):
        spec, job = PlanSpec.of(model, **options), None
    else:
        spec, job = PlanSpec.of(**options), model
    if spec.model is not None and spec.model.endswith(".toml"):
        spec = of_plan_file(spec)
    cluster = parse_cluster(spec.cluster, spec.catalogue)
    max_bytes = check_options(spec, cluster, is_job=job is not None or spec.is_job)
    settings, job, job_settings = _settings(spec, job)
    check_engine_settings(spec, settings)
    subject = _subject(spec, job, cluster)
    check_batch(subject.batch_size)
    check_length(spec, subject.model.plain.tokens_per_sample, subject.num_steps)
    precision = None if spec.precision is None else subject.precision
    own = OwnOptions(name=spec.plan, batch_size=subject.batch_size, precision=precision, settings=settings)
    conditions = own.conditions(cluster)
    if conditions.has("precision"):
        subject = subject.in_precision(conditions.plan.precision)
    history = read_history(cluster) if spec.history else MachineHistory()
    if spec.max_gpus is not None or not own.compares_natively(cluster, spec.engine):
        history = MachineHistory(num_damaged=history.num_damaged)  # it is of all devices, and of engine torch
    question = with_memory_margin(subject.question(cluster, max_bytes, conditions), history)
    answer, sizes = _searched(question, spec.max_gpus)
    answer = corrected(answer, history)
    asked = None
    if own.is_named or settings:  # devices may be idle under the recommended plan only
        asked = _asked(own, subject, answer, history, cluster if own.is_named else answer.question.cluster)
    report = PlanReport(
        spec=spec,
        subject=subject,
        answer=answer,
        forms=engine_named(spec.engine).plan_forms(answer.question),
        asked=asked,
        sizes=tuple(sizes),
        hints=() if spec.max_gpus else tuple(hints(answer)),
        job_settings=job_settings,
        num_damaged=history.num_damaged,
    )
    return _with_verdict(report, batch_is_fixed=spec.batch_size is not None or job is not None)


def _asked(own: OwnOptions, subject: Subject, answer: Answer, history: MachineHistory, cluster: Cluster) -> Asked:
    """Return the user's own plan with its prediction, corrected as those of the search are."""
    plan = own.resolve(cluster, functools.partial(_best_with, answer, history))
    question = subject.in_precision(plan.precision).question(cluster, answer.question.max_bytes)
    question = with_memory_margin(question, history)
    return _corrected_asked(predict_asked(plan, question, batch_is_given=own.batch_is_given(cluster)), history)


def _corrected_asked(asked: Asked, history: MachineHistory) -> Asked:
    """Return the user's own plan with its times corrected as those of the search are."""
    corrected = {}
    for name in ("candidate", "default", "leaner"):
        candidate = getattr(asked, name)
        if candidate is not None:
            corrected[name] = corrected_candidate(candidate, history)
    return dataclasses.replace(asked, **corrected)  # type: ignore[arg-type]


plan.__signature__ = signature_of(PlanSpec, PlanReport)  # type: ignore[attr-defined]  # each option with its default


def _searched(question: Question, max_gpus: int | None) -> tuple[Answer, list[Answer]]:
    """Return the result of the search, on the best number of devices if it is limited, and those of other numbers."""
    if max_gpus is None and question.batch_size % question.cluster.num_devices == 0:
        return search(question), []
    if max_gpus is None:
        return search_fewer(question), []
    return best_size(question, max_gpus)


def _best_with(answer: Answer, history: MachineHistory, fixed: FixedFields, _: int) -> tuple[Plan | None, str]:
    """Return the best plan with the fixed fields, else the recommended one, in which they replace others, for `settle`.

    None and the reason if no plan fits.
    """
    found = answer
    if is_searched_again(fixed):
        found = corrected(search(dataclasses.replace(answer.question, fixed=fixed)), history)
    best = found.best or answer.best
    if best is None:
        return None, "that fits was not found"
    return best.plan, ""


def _with_verdict(report: PlanReport, *, batch_is_fixed: bool) -> PlanReport:
    """Return the report with the exit code 3 and advice if no plan fits, or the user's own plan does not."""
    advice = ""
    if report.best is None:
        advice = _advice(report, batch_is_fixed=batch_is_fixed)
    is_refused = report.asked is not None and not report.asked.fits
    if not advice and not is_refused:
        return report
    return msgspec.structs.replace(report, advice=advice, exit_code=CHECK_FAILED)


def _settings(spec: PlanSpec, job: Job | None) -> tuple[dict[str, str], Job | None, tuple[str, ...]]:
    """Return the fields of the plan that --set and --compile change, the job with its own --set options, and these."""
    if job is not None or not spec.is_job:
        return plan_settings(spec.settings, spec.compile), job, ()
    reference, of_plan = split_settings(spec.model or "", spec.settings)
    own = dict(reference.overrides)
    if spec.batch_size is not None:
        own["batch_size"] = str(spec.batch_size)
    return with_compile(of_plan, spec.compile), load_job(reference), tuple(f"{key}={own[key]}" for key in own)


def _subject(spec: PlanSpec, job: Job | None, cluster: Cluster) -> Subject:
    """Return the model of the job, or the published model."""
    if job is not None:
        owner = spec.model or "the job"
        return job_subject(job, cluster, batch_size=spec.batch_size, precision=spec.precision, owner=owner)
    if spec.model is None:
        raise InputError(
            "plan requires a model",
            code="plan.nothing-named",
            fix="pass a published model, a job, or --from-deepspeed FILE",
        )
    is_file = spec.plan.endswith(".toml") and spec.batch_size is None
    subject = published_subject(
        spec.model,
        cluster,
        batch_size=read_plan(Path(spec.plan)).batch_size if is_file else spec.batch_size,
        length=spec.length,
        precision=spec.precision,
        lora=spec.lora,
    )
    return dataclasses.replace(subject, batch_source=spec.plan) if is_file else subject


def load_named_job(spec: PlanSpec) -> Job:
    """Return the job in the file `spec.model`, with its --set options."""
    return load_job(split_settings(spec.model or "", spec.settings)[0])


def _advice(report: PlanReport, *, batch_is_fixed: bool) -> str:
    """Return the message that no plan fits, or that none divides the batch, with the smallest change that helps."""
    question, families = report.answer.question, report.answer.families.values()
    name, cluster, batch = question.model.plain.name, question.cluster, question.batch_size
    where = f"{cluster.num_devices:,} x {cluster.device.name}"
    fact = f"no plan of {name} fits on {where}"
    if batch % cluster.num_devices and all(entry.memory is None for entry in families):
        fact = f"no plan of {name} divides a batch of {batch:,} evenly over {where}"
    rules = [entry.detail for entry in families if isinstance(entry, Rejected) and entry.detail]
    if not batch % cluster.num_devices and all(entry.memory is None for entry in families) and rules:
        return f"no plan of {name} is accepted by `train`: {rules[0]}"  # other sizes would not help
    changes = changes_that_fit(question, batch_is_fixed=batch_is_fixed) or _shorter_length(report)
    if changes:
        return f"{fact}: use {', or '.join(changes)}"
    limit = f"nor on up to {LARGEST:,} of them, also with another batch size"
    return f"{fact} ({capacity_text(question)}), {limit}: use a smaller model"


def _shorter_length(report: PlanReport) -> list[str]:
    """Return the option of the largest half, quarter and so on of a published model's length with which a plan fits."""
    question, spec = report.answer.question, report.spec
    length = question.model.plain.tokens_per_sample or 0
    while spec.model is not None and not spec.is_job and length > SHORTEST:
        length //= 2
        model = _subject(spec.replace(length=length), None, question.cluster).model
        best = best_plan(dataclasses.replace(question, model=model))
        if best is not None:
            return [f"--length {length}, with which {best.family} fits"]
    return []
