"""The state of a training by name: tensors, optimizer state that is not a tensor, and the user's own state."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint.convert.contents import MODEL, OPTIMIZER
from shardwise.errors import JobError, some_of
from shardwise.job.lora import facts_of
from shardwise.training.step.module_step import adapter_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.parallel.optimizer import Optimized
    from shardwise.plans import Plan
    from shardwise.training.step.module_step import Forms, Held
    from shardwise.training.step.step import Step


UPDATE = "update/"


def state_tensors(step: Step, replica: int = 0) -> dict[str, Tensor]:
    """Return this rank's tensors of a training by name: whole ones, and pieces as DTensors; on every rank.

    model/NAME, optimizer/PARAMETER/KEY and update/KEY, under the names of the user's own module. Replicas that train on
    their own have equal weights when they have met, and optimizers of their own: those of all but the first are in
    update/replicaN/PARAMETER/KEY.
    """
    return _named(step.held(), _states_of(replica))


def make_room(step: Step, saved: Forms, replica: int = 0) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint is to fill, with optimizer states made as it has them.

    `saved` gives shape and dtype of every tensor in it. A replica of which it has none goes on from the first's.
    """
    own = _states_of(replica)
    prefix = own if any(name.startswith(own) for name in saved) else OPTIMIZER
    states = {name.removeprefix(prefix): form for name, form in saved.items() if name.startswith(prefix)}
    return _named(step.room(states), prefix)


def _states_of(replica: int) -> str:
    return f"{UPDATE}replica{replica}/" if replica else OPTIMIZER


def _named(held: Held, states: str) -> dict[str, Tensor]:
    tensors = {f"{MODEL}{name}": value for name, value in held.values.items()}
    tensors |= {f"{MODEL}{name}": buffer for name, buffer in held.buffers.items()}
    tensors |= {f"{states}{name}": value for name, value in held.states.items()}
    return tensors | {f"{UPDATE}{key}": value for key, value in held.update.items()}


def state_facts(job: Job, plan: Plan, world: World, step: Step) -> dict[str, Any]:
    """Return what a checkpoint says in words and numbers; communicates over the world, on every rank."""
    from shardwise.plans.toml import plan_to_toml

    return {
        "step": step.number,
        "num_steps": step.length.num_steps,
        "seed": job.seed,
        "batch_size": job.batch_size,
        "plan": plan_to_toml(plan),
        "layout": str(plan.layout),
        "torch": str(torch.__version__),
        "optimizer": {
            "class": step.optimized.kind,
            "groups": _groups(step, world),
            "values": merge_plain_states(world.gather(plain_states(step.optimized)), step.optimized.kind),
        },
        "tied": step.tied(),
        **_adapters(job, step),
        "random": {str(rank): state for rank, state in enumerate(world.gather(_written(step.random_state())))},
    }


def restore_random(facts: Mapping[str, Any], plan: Plan, world: World, step: Step) -> bool:
    """Continue the generators of each rank; false where the layout is another one and a fresh stream begins.

    A fresh stream depends on the seed, the data-parallel rank and the step, so every resume begins the same one.
    """
    states = facts.get("random", {})
    if facts.get("layout") != str(plan.layout) or str(world.rank) not in states:
        step.seed(hash((facts.get("seed", 0), plan.layout.draw_index(world.rank), step.number)) & (2**62 - 1))
        return False
    step.set_random_state(
        {
            name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            for name, text in states[str(world.rank)].items()
        }
    )
    return True


def check_same_job(facts: Mapping[str, Any], job: Job, *, number: int, num_steps: int) -> None:
    """Refuse to go on with another stream of samples than the checkpoint's; one from elsewhere may not say."""
    for name, now in (("seed", job.seed), ("batch_size", job.batch_size)):
        if facts.get(name, now) != now:
            raise JobError(
                f"the checkpoint was saved with {name} {facts.get(name)}, the job has {now}: other samples would come",
                code="checkpoint.samples-differ",
                fix=f"--set {name}={facts.get(name)}, or --resume never",
            )
    saved = facts_of(facts)
    if saved is not None and job.lora is not None and saved.get("alpha") != job.lora.alpha:
        raise JobError(
            f"the checkpoint's adapters have alpha {saved.get('alpha')}, the job's {job.lora.alpha}",
            code="job.adapter-option-mismatch",
            fix=f"--set lora.alpha={saved.get('alpha')}, or --resume never",
        )
    if number > num_steps:
        raise JobError(
            f"the checkpoint is at step {number}, the job ends at {num_steps}",
            code="checkpoint.beyond-last-step",
            fix=f"--set steps=N with N of at least {number}, as the run that saved it had, or --resume never",
        )


def _written(states: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def _adapters(job: Job, step: Step) -> dict[str, Any]:
    """Return what a checkpoint tells of adapters; communicates over the world where there are some."""
    return {} if job.lora is None else {"lora": {**(adapter_facts(step.model) or {}), "base": job.weights}}


def _groups(step: Step, world: World) -> list[dict[str, Any]]:
    """Return the optimizer's groups with the names of their parameters on all stages; communicates over the world."""
    everyone = world.gather(step.optimized.group_names())
    groups = []
    for number, group in enumerate(step.optimized.param_groups):
        members = [name for groups_there in everyone for name in (groups_there[number : number + 1] or [[]])[0]]
        groups.append(_plain(group) | {"params": list(dict.fromkeys(members))})
    return groups


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Keep of a parameter group what JSON can hold."""
    kept = {key: value for key, value in group.items() if key != "params"}
    return {key: value for key, value in kept.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return False
    return True


# Optimizer state that is not a tensor: an int `step` beside the moments, a setting that the optimizer adapts.
#
# torch's optimizers keep tensors alone, but any `torch.optim.Optimizer` may keep Python values in
# `state[parameter]` (older Adam variants count steps in an int) or change its `param_groups` while it trains
# (Prodigy's `d`, schedule-free's `k`). Both are part of the training's state: a resumed run without them continues
# with other updates.


_SET_EACH_STEP = {"params", "lr"}
"""Keys of a parameter group that are not state: the members, and the rate that the job's schedule sets."""


def plain_states(optimized: Optimized) -> dict[str, Any]:
    """Return the optimizer's Python values as PARAMETER/KEY, and as #GROUP/KEY what changed in a parameter group.

    A value that JSON would not return as it is, and one that belongs to no parameter of the model, is refused by name.
    """
    optimizer: Any = optimized.optimizer
    if not isinstance(optimizer, Optimizer):
        return {}  # another engine's, which keeps arrays alone
    names = {id(parameter): name for name, parameter in optimized.named}
    found: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        name = names.get(id(parameter))
        if values and name is None:
            raise JobError(
                f"optimizer {optimized.kind} keeps {some_of(values)} for a tensor that is not a parameter of the model",
                code="optimizer.state-foreign-tensor",
                fix="keep its state as tensors, or train with --set engine=torch",
            )
        found |= {f"{name}/{key}": value for key, value in values.items()}
    for number, (group, first) in enumerate(zip(optimizer.param_groups, optimized.first_settings, strict=True)):
        found |= {f"#{number}/{key}": value for key, value in group.items() if _has_changed(key, value, first)}
    return {name: plain_value(value, (f"state {name} of optimizer {optimized.kind}",)) for name, value in found.items()}


def merge_plain_states(everyone: Iterable[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Return the values of all ranks as one dict; refuses a value that ranks disagree on."""
    merged: dict[str, Any] = {}
    for values in everyone:
        for name, value in values.items():
            if merged.setdefault(name, value) != value:
                raise JobError(
                    f"optimizer {kind} keeps {name} as {merged[name]} on one rank and {value} on another",
                    code="optimizer.state-ranks-differ",
                    fix="use a plan that keeps parameters whole (ddp), or keep the value as a tensor",
                )
    return merged


def restore_plain_states(optimized: Optimized, values: Mapping[str, Any]) -> None:
    """Put the values of `plain_states` back into the optimizer; names of other ranks' parameters are left out."""
    parameters = dict(optimized.named)
    groups: Sequence[dict[str, Any]] = optimized.param_groups
    for full, value in values.items():
        name, _, key = full.rpartition("/")
        if name.startswith("#"):
            number = int(name[1:])
            if number < len(groups):
                groups[number][key] = value
        elif name in parameters:
            optimized.optimizer.state[parameters[name]][key] = value


def _has_changed(key: str, value: Any, first: Mapping[str, Any]) -> bool:
    if key in _SET_EACH_STEP or isinstance(value, Tensor):
        return False
    return bool(key not in first or first[key] != value)


# The user's own state in a checkpoint: plain values go into its manifest, tensors into its shards, nothing else in.


USER = "user/"
"""Tensors of the user's own: user/KEY, or user/KEY/KEY where dicts are nested."""


def split_state(state: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take what `Job.state.state_dict()` returned apart into plain values and tensors by name.

    Dicts with names as keys, lists, str, bool, None, finite numbers and, in dicts, tensors come back as they are;
    anything else is refused by its place.
    """
    if not isinstance(state, dict):
        raise JobError(
            f"Job.state.state_dict() returned a {type(state).__name__}", code="job.state-not-dict", fix="return a dict"
        )
    tensors: dict[str, Tensor] = {}
    return _plain_dict(state, ("Job.state",), tensors), tensors


def join_state(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Put together again what `split_state` took apart."""
    state = dict(values)
    for name, tensor in tensors.items():
        *outer, last = name.removeprefix(USER).split("/")
        place = state
        for key in outer:
            place = place[key]
        place[last] = tensor
    return state


def room_for(saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]], now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return fresh tensors for the user's own in `saved`: cut and placed as they are `now`, else whole on the host."""
    room = {}
    for name, (shape, dtype) in saved.items():
        if name.startswith(USER):
            like = now.get(name)
            if like is not None and (tuple(like.shape), like.dtype) == (shape, dtype):
                room[name] = torch.zeros_like(like, requires_grad=False)
            else:
                room[name] = torch.zeros(shape, dtype=dtype)
    return room


def _plain_dict(state: dict[Any, Any], place: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Any]:
    values = {}
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key:
            raise JobError(
                f"{_words(place)} has the key {key!r}", code="job.state-key-invalid", fix="use names without '/'"
            )
        here = (*place, key)
        if isinstance(value, Tensor):
            tensors[USER + "/".join(here[1:])] = value.detach()
        elif isinstance(value, dict):
            values[key] = _plain_dict(value, here, tensors)
        else:
            values[key] = plain_value(value, here)
    return values


def plain_value(value: Any, place: tuple[str, ...]) -> Any:
    """Return a value that JSON gives back as it is; refuses any other by its place: what it is in, then keys."""
    if isinstance(value, list):
        return [plain_value(each, (*place, str(index))) for index, each in enumerate(value)]
    if isinstance(value, dict):
        inside: dict[str, Tensor] = {}
        values = _plain_dict(value, place, inside)
        if not inside:
            return values
        raise JobError(
            f"{_words(place)} is in a list and holds a tensor",
            code="job.state-tensor-in-list",
            fix="use a dict instead of the list",
        )
    # The very types: what JSON would return as another one (a tuple, an enum, numpy's numbers) does not come back.
    if type(value) not in {str, int, float, bool, type(None)}:
        words = f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
        raise JobError(
            f"{_words(place)} is {words}",
            code="job.state-type-unsupported",
            fix="use tensors, dicts, lists, str, numbers, bool and None",
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(
            f"{_words(place)} is {value}, which JSON cannot represent",
            code="job.state-not-finite",
            fix="use None, or a tensor",
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise JobError(f"{_words(place)} has more than 64 bits", code="job.state-integer-too-large", fix="use a str")
    return value


def _words(place: tuple[str, ...]) -> str:
    return place[0] + "".join(f"[{key!r}]" for key in place[1:])
