"""`shardwise verify --propose-rules`: tensor rules for the user's own model, confirmed and written down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.runs.console import complain, say

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardwise.job import JobReference
    from shardwise.parity.plans import Exact
    from shardwise.parity.report import PlanVerdict


def propose_rules(
    reference: JobReference, *, nproc: int, steps: int, precision: Exact, shrink: bool, as_json: bool, out: Path | None
) -> int:
    """Propose rules, say them as Python or JSON, write them to `out`, and return the exit code."""
    from shardwise.job.job import rules_to_toml
    from shardwise.parity.propose import propose

    found = propose(reference, nproc=nproc, steps=steps, precision=precision, shrink=shrink, on_trial=_tell)
    if out is not None and found.rules:
        out.write_text(rules_to_toml(found.rules, found.words))
    if as_json:
        say(_as_json(found))
    elif found.rules:
        say(_as_python(found.rules))
    for part, reason in found.weakened.items():
        complain(f"{part} could be cut more, but then: {reason}")
    complain(found.words)
    return found.exit_code


def check_options(
    *,
    propose: bool,
    nproc: int | None,
    plans: str,
    settings: Mapping[str, str],
    resume: bool,
    backend: str,
    markdown: Path | None,
    out: Path | None,
) -> None:
    """Refuse options that say nothing together."""
    from shardwise.errors import InputError

    if out is not None and not propose:
        raise InputError(
            f"--out {out} is for tensor rules",
            code="cli.option-not-applicable",
            fix="add --propose-rules, or write --markdown FILE",
        )
    if out is not None and not out.parent.is_dir():
        raise InputError(
            f"--out {out} is in a folder that is not there",
            code="cli.output-folder-missing",
            fix="make the folder first",
        )
    given = {
        "--plans": plans != "all",
        "--resume": resume,
        f"--backend {backend}": backend != "gloo",
        "--markdown": markdown is not None,
    }
    named = [option for option, is_given in given.items() if is_given] + [f"--set {key}" for key in settings]
    if propose and named:
        raise InputError(
            f"--propose-rules tries tp alone, and {named[0]} asks for more",
            code="cli.options-conflict",
            fix="run one after the other",
        )
    if propose and nproc == 1:
        raise InputError(
            "--propose-rules tries rules with tp=1, and tp=1 cuts nothing",
            code="verify.rules-one-rank",
            fix="use --nproc 2 or more",
        )


def _as_python(rules: Mapping[str, str]) -> str:
    """Write rules as they are pasted into a job file."""
    lines = [f"    {pattern!r}: {style!r},".replace("'", '"') for pattern, style in rules.items()]
    return "\n".join(["tensor_rules={", *lines, "},"])


def _as_json(found: object) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(found), indent=1).decode()


def _tell(rules: dict[str, str], verdict: PlanVerdict) -> None:
    """Say that a trial is done, while others may still come."""
    complain(f"tried {len(rules)} tensor rule{'s'[: len(rules) > 1]}: {verdict.status} ({verdict.seconds:.1f} s)")
