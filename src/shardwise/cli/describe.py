"""A job's model for planning, and the nearest key for a `--set` or an option that does not exist."""

from __future__ import annotations

import dataclasses
import difflib
from functools import cache
from typing import TYPE_CHECKING, Any

from shardwise.environment import cache_directory
from shardwise.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    import click

    from shardwise.job import Job
    from shardwise.planner.model.forms import Model
    from shardwise.plans.plan import DType, Plan


def describe_job(job: Job, compute: DType) -> Model:
    """Return the model of a job as planning sees it, computed in `compute`."""
    from shardwise.planner.trace.trace import described

    return described(job, compute, cache_directory() / "models")


def job_rules(job: Job) -> Callable[[Plan], None]:
    """Return the check that `train` makes of a plan for this job; the model is built once, for the first plan."""

    @cache
    def rules() -> Callable[[Plan], None]:
        from shardwise.training.preflight import ModelRules

        return ModelRules(job)

    def check(plan: Plan) -> None:
        rules()(plan)

    return check


# Keys of --set, nested ones included, and what to type in place of a key or an option that does not exist.


def set_keys() -> frozenset[str]:
    """Return the dotted keys that --set knows by itself: fields of Job and Plan, and of what shardwise puts there."""
    from shardwise.job import Job, Lora
    from shardwise.job.optimizers import SGD, AdamW
    from shardwise.job.schedules import Constant, Cosine, Linear
    from shardwise.plans import Plan

    sections: list[tuple[str, Any]] = [("", Job), ("", Plan), ("lora.", Lora)]
    sections += [("optimizer.", kind) for kind in (AdamW, SGD)]
    sections += [("schedule.", kind) for kind in (Constant, Cosine, Linear)]
    for part in dataclasses.fields(Plan):
        kind: Any = part.default_factory
        if part.name != "layout" and dataclasses.is_dataclass(kind):
            sections.append((f"{part.name}.", kind))
    keys = {prefix + part.name for prefix, kind in sections for part in dataclasses.fields(kind)}
    return frozenset(keys - {"version", "sources", "layout"})


def nearest_key(key: str) -> str:
    """Return advice for a key that does not exist: the keys that end in it, else the one that is spelled most alike."""
    keys = set_keys()
    if found := _ending_in(key, keys):
        return f"did you mean {' or '.join(map(repr, found))}?"
    return nearest(key, keys if "." in key else {known for known in keys if "." not in known})


def unknown_option(error: click.NoSuchOption) -> str:
    """Return the sentence for an option that does not exist: a key of --set by that name, else the nearest option."""
    name = error.option_name
    fact = f"there is no option {name}"
    if error.ctx is None:
        return fact
    parameters = error.ctx.command.params
    options = [option for parameter in parameters for option in parameter.opts]
    options = [option for option in options if option.startswith("--")]
    found = _ending_in(name.strip("-").replace("-", "_"), set_keys()) if "--set" in options else []
    if found:
        return f"{fact}: use {' or '.join(f'--set {key}=VALUE' for key in found)}"
    # Without the dashes, which every option has in common: with them --lr is like --help.
    close = difflib.get_close_matches(name.strip("-"), [option.strip("-") for option in options], n=1)
    return f"{fact}: " + (f"did you mean --{close[0]}?" if close else f"{error.ctx.command_path} --help lists them")


def _ending_in(name: str, keys: frozenset[str]) -> list[str]:
    last = name.rpartition(".")[2]
    return sorted(key for key in keys if key.rpartition(".")[2] == last)
