"""Runs the model of a job that has no tensor-parallel rules, proposes rules for it, and verifies them."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch.utils.data import default_collate

from shardwise.data.loaders import dataset_of
from shardwise.errors import InputError, JobError
from shardwise.job.job import rules_to_toml
from shardwise.launcher.local.function import run_forked
from shardwise.parallel.meta_model import structure
from shardwise.parallel.propose_rules import ProposedSplit, merged, propose_splits
from shardwise.parity.prepare import Preparation, job_name, job_source, prepare_job
from shardwise.parity.runner import ParityRunner, preload
from shardwise.parity.spec import PROPOSE_NPROC, UNKNOWN, PlanVerdict, verdict_lines
from shardwise.parity.verify import verify_plan
from shardwise.runs.console import CHECK_FAILED, DONE
from shardwise.spec import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardwise.job import Job
    from shardwise.parity.spec import Exact, VerifySpec

    OnTrial = Callable[[dict[str, str], PlanVerdict], None]

SAMPLES = 2
"""Number of samples in the batch with which the model is run; batch norm needs more than one."""


class RulesReport(Report, frozen=True, kw_only=True):
    """Tensor-parallel rules for the model of a job, and the verdict of their verification."""

    job: str
    model: str
    nproc: int
    rules: dict[str, str]
    """Module name pattern -> tensor-parallel style; empty if no rules passed."""
    verdict: PlanVerdict | None
    """Verdict of the last rules that were tried, which are `rules` if any passed; None if no rules were tried."""
    weakened: dict[str, str]
    """Part of the model -> reason why its preferred rules failed."""

    def to_text(self) -> str:
        """Return the rules as Python code for a job file; empty if there are no rules."""
        if not self.rules:
            return ""
        lines = [f"    {pattern!r}: {style!r},".replace("'", '"') for pattern, style in self.rules.items()]
        return "\n".join(["tensor_rules={", *lines, "},"])

    def to_toml(self) -> str:
        """Return the rules as the text of a TOML file for `Job(tensor_rules=...)`."""
        return rules_to_toml(self.rules, self.summary)

    def note(self) -> str:
        """Return the reasons why the preferred rules of some parts of the model failed, and the summary."""
        lines = [f"{part} does not use its preferred rules: {reason}" for part, reason in self.weakened.items()]
        return "\n".join([*lines, self.summary])

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        if self.rules and self.verdict is not None:
            worst = f", worst gap {self.verdict.worst.relative:.1e}" if self.verdict.worst else ""
            return f"{self.model}: {len(self.rules)} tensor rules confirmed, tp={self.nproc} equals one process{worst}"
        if self.verdict is None:
            return f"{self.model} cannot be sharded for tp={self.nproc}: it has no suitable linear module or embedding"
        return f"{self.model}: no proposal for tp={self.nproc} equals one process: {_reason(self.verdict)}"


def propose_rules(spec: VerifySpec, *, job: Job | None = None, on_trial: OnTrial = lambda *_: None) -> RulesReport:
    """Propose tensor-parallel rules for the model of a job, and verify them on forked ranks against one process.

    `job` replaces the job file. If the preferred rules fail, each part of the model is tried separately, also with
    rules that shard less, and the rules that pass are tried together. This process runs no tensor operations.
    """
    source, plan_settings = job_source(spec, job)
    nproc = spec.nproc or PROPOSE_NPROC
    _check_options(spec, nproc, plan_settings)
    preload()
    preparation = Preparation(source=source, steps=spec.num_steps, shrink=spec.shrink)
    (proposed,) = run_forked(lambda _: _propose_splits(preparation, nproc), 1, timeout_s=spec.timeout_s)
    model, batch_size, splits = proposed
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as folder:
        runner = ParityRunner(
            preparation=preparation, batch_size=batch_size, folder=Path(folder), timeout_s=spec.timeout_s
        )
        if splits:
            preload(runner.one(spec.precision).traced[0].imported)
        trials = _Trials(runner, nproc, spec.precision, on_trial)
        rules = narrow(splits, trials)
    return RulesReport(
        job=job_name(source),
        model=model,
        nproc=nproc,
        rules=rules,
        verdict=trials.last,
        weakened=_weakened(splits, trials, rules),
        exit_code=DONE if rules else CHECK_FAILED,
    )


def _check_options(spec: VerifySpec, nproc: int, plan_settings: Mapping[str, str]) -> None:
    """Raise InputError for options that are valid only for a comparison of plans."""
    options = {
        "--plans": spec.plans != "all",
        "--resume": spec.resume,
        f"--backend {spec.backend}": spec.backend != "gloo",
    }
    options |= {f"--set {key}": True for key in plan_settings}
    for option, is_given in options.items():
        if is_given:
            raise InputError(
                f"--propose-rules cannot be combined with {option}",
                code="cli.options-conflict",
                fix=f"run verify without {option}, or without --propose-rules",
            )
    if nproc == 1:
        raise InputError(
            "--propose-rules requires at least 2 ranks for tensor parallelism, got 1",
            code="verify.rules-one-rank",
            fix="pass --nproc 2 or more",
        )


class _Trials:
    """Verifies tensor-parallel rules against one process; verdicts are cached by rules."""

    def __init__(self, runner: ParityRunner, nproc: int, precision: Exact, on_trial: OnTrial) -> None:
        self._runner = runner
        self._nproc = nproc
        self._precision = precision
        self._on_trial = on_trial
        self.verdicts: dict[frozenset[tuple[str, str]], PlanVerdict] = {}
        self.last: PlanVerdict | None = None

    def passes(self, rules: dict[str, str]) -> bool:
        """Train with the rules on forked ranks and return whether the results equal those of one process."""
        key = frozenset(rules.items())
        if key not in self.verdicts:
            self._runner.preparation = msgspec.structs.replace(self._runner.preparation, tensor_rules=rules)
            began = time.perf_counter()
            verdict = verify_plan(self._runner, "tp", self._nproc, self._precision)
            self.verdicts[key] = msgspec.structs.replace(verdict, seconds=time.perf_counter() - began)
            self._on_trial(rules, self.verdicts[key])
        self.last = self.verdicts[key]
        return self.last.status == "passed"


def _propose_splits(preparation: Preparation, degree: int) -> tuple[str, int, tuple[ProposedSplit, ...]]:
    """Return the model's class name, the batch size and the possible splits; runs the model, so call it in a fork."""
    job = prepare_job(preparation)
    module = structure(job.model, job.seed).module
    batch = _first_batch(job)
    splits = propose_splits(module, lambda model: job.forward(model, batch), degree=degree)
    return type(module).__name__, job.batch_size, splits


def _first_batch(job: Job) -> Any:
    dataset = dataset_of(job, "train")
    if dataset is None or len(dataset) == 0:
        raise JobError(
            "--propose-rules requires training samples, but the job has no training data",
            code="data.no-train-split",
            fix='return a dataset for "train"',
        )
    return (job.collate or default_collate)([dataset[index % len(dataset)] for index in range(SAMPLES)])


def narrow(splits: Iterable[ProposedSplit], trials: _Trials) -> dict[str, str]:
    """Return the preferred rules of all parts or, if they fail together, the rules that pass for each part; else {}."""
    best = merged(split.options[0] for split in splits)
    if not best or trials.passes(best):
        return best
    if trials.last is not None and trials.last.is_random:
        return {}  # with other rules, the ranks sample different numbers, too
    kept = merged(_first_passing(split, trials) for split in splits)
    return kept if kept and trials.passes(kept) else {}


def _first_passing(split: ProposedSplit, trials: _Trials) -> dict[str, str]:
    """Return the first rules of a part of the model that pass separately; empty if none pass."""
    for rules in split.options:
        if trials.passes(rules):
            return rules
    return {}


def _weakened(splits: Iterable[ProposedSplit], trials: _Trials, rules: dict[str, str]) -> dict[str, str]:
    """Return the reasons why the preferred rules of parts of the model failed, by part."""
    lost = [split for split in splits if not split.options[0].items() <= rules.items()]
    verdicts = {split.name: trials.verdicts.get(frozenset(split.options[0].items())) for split in lost}
    failed = {name: verdict for name, verdict in verdicts.items() if verdict and verdict.status != "passed"}
    return {name: _reason(verdict) for name, verdict in failed.items()} if rules else {}


def _reason(verdict: PlanVerdict) -> str:
    """Return the cause of a failed verdict and its fix; if the cause is not known, the error or first divergence."""
    known = [str(finding) for finding in verdict.findings if finding.cause != UNKNOWN]
    return (known or verdict_lines(verdict)[-1:] or [verdict.status])[0]
