"""The state of a training run by name: tensors, optimizer state that is not a tensor, and user state."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint.convert.contents import MODEL, OPTIMIZER
from shardwise.data.corpus import CorpusPosition
from shardwise.data.feed import DataPosition, StreamPosition
from shardwise.errors import JobError, some_of
from shardwise.job.lora import facts_of
from shardwise.plans.toml import plan_to_toml
from shardwise.training.step.module_step import adapter_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.parallel.optimizer import Optimized
    from shardwise.plans import Plan
    from shardwise.training.step.module_step import Forms, LocalState
    from shardwise.training.step.step import Step


UPDATE = "update/"


def state_tensors(step: Step, replica: int = 0) -> dict[str, Tensor]:
    """Return this rank's tensors of the training state by name, shards as DTensors; call on every rank.

    Names are model/NAME, optimizer/PARAMETER/KEY and update/KEY, with the parameter names of the user's module.
    With `sync_every`, replicas have equal weights after a synchronization but separate optimizer states: those of all
    replicas except the first are named update/replicaN/PARAMETER/KEY.
    """
    return _named(step.local_state(), _states_of(replica))


def load_targets(step: Step, saved: Forms, replica: int = 0) -> dict[str, Tensor]:
    """Return the tensors to load a checkpoint into, with optimizer states allocated as the checkpoint has them.

    `saved` is the shape and dtype of every tensor of the checkpoint. A replica without saved optimizer state loads the
    state of the first replica.
    """
    prefix = _states_of(replica)
    if not any(name.startswith(prefix) for name in saved):
        prefix = OPTIMIZER
    states = {}
    for name, form in saved.items():
        if name.startswith(prefix):
            states[name.removeprefix(prefix)] = form
    return _named(step.load_targets(states), prefix)


def _states_of(replica: int) -> str:
    return f"{UPDATE}replica{replica}/" if replica else OPTIMIZER


def _named(state: LocalState, states_prefix: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for prefix, named in (
        (MODEL, state.values),
        (MODEL, state.buffers),
        (states_prefix, state.states),
        (UPDATE, state.update),
    ):
        for name, tensor in named.items():
            tensors[prefix + name] = tensor
    return tensors


def state_facts(job: Job, plan: Plan, world: World, step: Step) -> dict[str, Any]:
    """Return the facts (state other than tensors) of a checkpoint. Communicates over the world; call on every rank."""
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
        **_position(step),
        **_adapters(job, step),
        "random": {str(rank): state for rank, state in enumerate(world.gather(_as_base64(step.random_state())))},
    }


def _position(step: Step) -> dict[str, Any]:
    """Return the position of a corpus or a stream after the last step; empty for other data, where the step has it."""
    position = step.feed.position
    if position is None:
        return {}
    key = "stream" if isinstance(position, StreamPosition) else "data"
    return {key: msgspec.to_builtins(position)}


def saved_position(facts: Mapping[str, Any]) -> DataPosition | None:
    """Return the position of a corpus or a stream that a checkpoint contains, or None."""
    if "stream" in facts:
        return msgspec.convert(facts["stream"], StreamPosition)
    return msgspec.convert(facts["data"], CorpusPosition) if "data" in facts else None


def restore_random(facts: Mapping[str, Any], plan: Plan, world: World, step: Step) -> bool:
    """Restore the random generators of this rank; if the layout differs, seed new random streams and return False.

    New streams depend only on the seed, the data-parallel rank and the step, so resuming is reproducible.
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


def check_same_samples(facts: Mapping[str, Any], job: Job) -> None:
    """Raise JobError if the order of samples would be another one; converted checkpoints may lack these facts."""
    for name, now in (("seed", job.seed), ("batch_size", job.batch_size)):
        if facts.get(name, now) != now:
            raise JobError(
                f"the checkpoint was saved with {name} {facts.get(name)}, but the job has {now}: samples would differ",
                code="checkpoint.samples-differ",
                fix=f"pass --set {name}={facts.get(name)}, or --resume never",
            )


def check_same_job(facts: Mapping[str, Any], job: Job, *, number: int, num_steps: int) -> None:
    """Raise JobError if a checkpoint has adapters of another scale, or is from a step after the last one of the job."""
    saved = facts_of(facts)
    if saved is not None and job.lora is not None and saved.get("alpha") != job.lora.alpha:
        raise JobError(
            f"the checkpoint was saved with lora.alpha {saved.get('alpha')}, but the job has {job.lora.alpha}",
            code="job.adapter-option-mismatch",
            fix=f"pass --set lora.alpha={saved.get('alpha')}, or --resume never",
        )
    if number > num_steps:
        raise JobError(
            f"the checkpoint was saved at step {number}, but the job ends at step {num_steps}",
            code="checkpoint.beyond-last-step",
            fix=f"pass --set steps=N with N >= {number}, or --resume never",
        )


def _as_base64(states: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def _adapters(job: Job, step: Step) -> dict[str, Any]:
    """Return the manifest facts about LoRA adapters. Communicates over the world if the job has adapters."""
    if job.lora is None:
        return {}
    return {"lora": {**(adapter_facts(step.model) or {}), "base": job.weights}}


def _groups(step: Step, world: World) -> list[dict[str, Any]]:
    """Return the parameter groups with the parameter names of all pipeline stages. Communicates over the world."""
    names_by_rank = world.gather(step.optimized.group_names())
    groups = []
    for number, group in enumerate(step.optimized.param_groups):
        members: dict[str, None] = {}
        for names in names_by_rank:
            if number < len(names):
                members |= dict.fromkeys(names[number])
        groups.append(_plain(group) | {"params": list(members)})
    return groups


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that JSON can represent."""
    return {key: value for key, value in group.items() if key != "params" and is_plain(value)}


def is_plain(value: Any) -> bool:
    """Return whether JSON can represent a value."""
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return False
    return True


# Optimizer state that is not a tensor: an int `step` beside the moments, or an option that the optimizer adapts.
#
# The optimizers in torch.optim store only tensors, but any `torch.optim.Optimizer` may store Python values in
# `state[parameter]` (older Adam variants count steps in an int) or change its `param_groups` during training
# (Prodigy's `d`, schedule-free's `k`). Both are part of the training state: without them, a resumed run would compute
# different updates.


_SET_EACH_STEP = {"params", "lr"}
"""Keys of a parameter group that are not state: its parameters, and the learning rate, which the schedule sets."""


def plain_states(optimized: Optimized) -> dict[str, Any]:
    """Return the optimizer's Python values as PARAMETER/KEY, and changed options of parameter groups as #GROUP/KEY.

    Raises JobError for a value that JSON cannot represent, and for state of a tensor that is not a model parameter.
    """
    optimizer: Any = optimized.optimizer
    if not isinstance(optimizer, Optimizer):
        return {}  # the optimizers of other engines store only arrays
    names = {id(parameter): name for name, parameter in optimized.named}
    found: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        name = names.get(id(parameter))
        if values and name is None:
            raise JobError(
                f"optimizer {optimized.kind} has non-tensor state {some_of(values)} for a tensor outside the model",
                code="optimizer.state-foreign-tensor",
                fix="store these values as tensors, which checkpoints can save, or pass --set engine=torch",
            )
        for key, value in values.items():
            found[f"{name}/{key}"] = value
    for number, (group, first) in enumerate(zip(optimizer.param_groups, optimized.first_settings, strict=True)):
        for key, value in group.items():
            if _has_changed(key, value, first):
                found[f"#{number}/{key}"] = value
    return {name: plain_value(value, (f"state {name} of optimizer {optimized.kind}",)) for name, value in found.items()}


def merge_plain_states(values_by_rank: Iterable[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Merge the values of all ranks into one dict; raise JobError if a value differs between ranks."""
    merged: dict[str, Any] = {}
    for values in values_by_rank:
        for name, value in values.items():
            if merged.setdefault(name, value) != value:
                raise JobError(
                    f"state {name} of optimizer {kind} is {merged[name]} on one rank and {value} on another",
                    code="optimizer.state-ranks-differ",
                    fix="use a plan that does not shard parameters (ddp), or store the value as a tensor",
                )
    return merged


def restore_plain_states(optimized: Optimized, values: Mapping[str, Any]) -> None:
    """Write the values of `plain_states` back to the optimizer, ignoring parameters that this rank does not own."""
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


# User state in a checkpoint: plain values are stored in the manifest, tensors in the shards; other types are rejected.


USER = "user/"
"""Prefix of the tensors of user state: user/KEY, or user/KEY/KEY for nested dicts."""


def split_state(state: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split the result of `Job.state.state_dict()` into plain values and tensors by name.

    Supports dicts with str keys, lists, str, bool, None, finite numbers and, as dict values, tensors. Any other value
    raises a JobError that names its path.
    """
    if not isinstance(state, dict):
        raise JobError(
            f"Job.state.state_dict() must return a dict, got {type(state).__name__}",
            code="job.state-not-dict",
            fix="return a dict",
        )
    tensors: dict[str, Tensor] = {}
    return _plain_dict(state, ("Job.state",), tensors), tensors


def join_state(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state dict that `split_state` split into values and tensors."""
    state = dict(values)
    for name, tensor in tensors.items():
        *outer, last = name.removeprefix(USER).split("/")
        inner = state
        for key in outer:
            inner = inner[key]
        inner[last] = tensor
    return state


def user_load_targets(
    saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]], now: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Allocate tensors to load the user tensors of `saved` into.

    A target is like the tensor of that name in `now` if shape and dtype are equal, and on the CPU otherwise.
    """
    targets = {}
    for name, (shape, dtype) in saved.items():
        if name.startswith(USER):
            like = now.get(name)
            if like is not None and (tuple(like.shape), like.dtype) == (shape, dtype):
                targets[name] = torch.zeros_like(like, requires_grad=False)
            else:
                targets[name] = torch.zeros(shape, dtype=dtype)
    return targets


def _plain_dict(state: dict[Any, Any], path: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Any]:
    values = {}
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key:
            raise JobError(
                f"{_subscripted(path)} has the invalid key {key!r}",
                code="job.state-key-invalid",
                fix="use str keys without '/'",
            )
        here = (*path, key)
        if isinstance(value, Tensor):
            tensors[USER + "/".join(here[1:])] = value.detach()
        elif isinstance(value, dict):
            values[key] = _plain_dict(value, here, tensors)
        else:
            values[key] = plain_value(value, here)
    return values


def plain_value(value: Any, path: tuple[str, ...]) -> Any:
    """Return `value` if JSON can represent it exactly, else raise JobError with its `path` (root, then keys)."""
    if isinstance(value, list):
        return [plain_value(each, (*path, str(index))) for index, each in enumerate(value)]
    if isinstance(value, dict):
        inside: dict[str, Tensor] = {}
        values = _plain_dict(value, path, inside)
        if not inside:
            return values
        raise JobError(
            f"{_subscripted(path)} contains a tensor, but tensors are supported only in dicts of Job.state",
            code="job.state-tensor-in-list",
            fix="use a dict instead of a list, and Job(state=...) instead of a callback's state",
        )
    # Exact types: JSON would return tuples, enums and numpy numbers as values of a different type.
    if type(value) not in {str, int, float, bool, type(None)}:
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise JobError(
            f"{_subscripted(path)} has the unsupported type {name}",
            code="job.state-type-unsupported",
            fix="use tensors, dicts, lists, str, numbers, bool and None",
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(
            f"{_subscripted(path)} is {value}, which JSON cannot represent",
            code="job.state-not-finite",
            fix="use None, or a tensor",
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise JobError(
            f"{_subscripted(path)} must fit in 64 bits", code="job.state-integer-too-large", fix="store it as a str"
        )
    return value


def _subscripted(path: tuple[str, ...]) -> str:
    """Return a path as Python subscripts: Job.state['a']['b']."""
    return path[0] + "".join(f"[{key!r}]" for key in path[1:])
