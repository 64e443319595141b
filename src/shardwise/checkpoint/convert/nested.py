"""The nested state that people save with torch: model, optimizer, step under many names, sorted into ours and back.

Torch files and torch.distributed.checkpoint folders hold the same shape: {"model": {name: tensor}, "optimizer":
{"state": ..., "param_groups": ...}}, perhaps one level deeper, perhaps with the weights on top.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.checkpoint.convert.contents import MODEL, OPTIMIZER, Contents
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from shardwise.checkpoint.pieces import Form

Key = tuple[str | int, ...]
"""Where a value is in a nested state."""

MODELS = frozenset({"model", "model_state_dict", "state_dict"})
OPTIMIZERS = frozenset({"optimizer", "optim", "optimizer_state_dict", "optim_state_dict"})
STEPS = frozenset({"step", "global_step", "num_steps", "iteration"})
OURS = "shardwise"
"""Where we keep what the others have no place for: facts as JSON text, and tensors that are no weights."""
_ROOTS = MODELS | OPTIMIZERS | {OURS}
_WRAPPERS = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before the names of a model's weights."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_SHAPED = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"})
"""Optimizer states that have the shape of their parameter."""


@dataclass
class Sorted:
    """A nested state taken apart."""

    places: dict[str, Key] = field(default_factory=dict)
    """Our names of its tensors -> where they are."""
    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def sort_out(
    forms: Mapping[Key, Form],
    values: Iterable[Key],
    value_of: Callable[[Key], Any],
    *,
    same: Mapping[Key, Key] | None = None,
) -> Sorted:
    """Give the tensors and values of a nested state our names; `value_of` is asked only for values that matter.

    What has no place in a checkpoint is listed in `left_out`. `same` maps tensors that are an earlier one.
    """
    every = {key: _inner(key) for key in (*forms, *values)}
    has_model = any(inner[0] in MODELS and len(inner) > 1 for inner in every.values())
    found = Sorted()
    states: dict[tuple[str | int, str], Key] = {}
    settings: dict[Key, Key] = {}
    for key, inner in every.items():
        if inner[0] in MODELS and len(inner) > 1 and key in forms:
            _place(found, MODEL + ".".join(map(str, inner[1:])), key)
        elif len(inner) == 1 and key in forms and not has_model:
            _place(found, MODEL + str(inner[0]), key)
        elif (state := _state(inner)) is not None and key in forms:
            states[state] = key
        elif (setting := _setting(inner)) is not None and key not in forms:
            settings[setting] = key
        elif inner[:2] == (OURS, "tensors") and key in forms:
            _place(found, ".".join(map(str, inner[2:])), key)
        elif inner == (OURS, "facts") and key not in forms:
            found.facts = _decode(value_of(key))
        elif len(inner) == 1 and inner[0] in STEPS and key not in forms:
            found.step = _number(value_of(key))
        else:
            found.left_out.append(f"{'.'.join(map(str, key))}: a checkpoint of ours has no place for it")
    prefix = _unwrapper(found)
    found.places = {_renamed(name, prefix): key for name, key in found.places.items()}
    _tie(found, same or {})
    _name_states(found, states, _groups(found, settings, value_of), forms, prefix)
    return found


def _tie(found: Sorted, same: Mapping[Key, Key]) -> None:
    """Keep weights that are others only as a fact."""
    names = {key: name.removeprefix(MODEL) for name, key in found.places.items() if name.startswith(MODEL)}
    tied = {names[key]: names[other] for key, other in same.items() if key in names and other in names}
    if tied:
        found.facts["tied"] = tied
    known = found.facts.get("tied")
    for alias in known if isinstance(known, dict) else ():
        found.places.pop(MODEL + alias, None)


def gather(kind: str, found: Sorted, forms: Mapping[Key, Form], read: Callable[[Key], Tensor]) -> Contents:
    """Return the contents of a nested state that was sorted out; `read` returns one of its tensors, whole."""
    places = found.places
    contents = Contents(
        kind=kind,
        step=found.step,
        forms={name: forms[key] for name, key in places.items()},
        facts=found.facts,
        read=lambda names: {name: read(places[name]) for name in names},
        left_out=tuple(found.left_out),
    )
    return contents if contents.step else dataclasses.replace(contents, step=_counted(contents))


def _counted(contents: Contents) -> int:
    """Return how many steps the optimizer has made, as its states hold it; 0 if they do not."""
    counts = [state["step"] for state in contents.states().values() if "step" in state]
    steps = [tensor for tensor in contents.read(counts).values() if tensor.numel() == 1]
    return max((int(tensor.item()) for tensor in steps), default=0)


def nest(contents: Contents, tensors: Mapping[str, Tensor], *, numbered: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the nested state of `contents`, whose tensors are given, and what has no place in it.

    `numbered` writes the optimizer as `torch.optim` does, by position; otherwise by name, as torch's
    get_optimizer_state_dict does.
    """
    model = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    model |= {alias: model[name] for alias, name in contents.tied.items()}
    nested: dict[str, Any] = {"model": model}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith((MODEL, OPTIMIZER))}
    left_out: list[str] = []
    states = {
        parameter: {key: tensors[name] for key, name in state.items()} for parameter, state in contents.states().items()
    }
    if states:
        nested["optimizer"], left_out = _nest_optimizer(contents, states, numbered=numbered)
    facts = {key: value for key, value in contents.facts.items() if key != "tied"}
    if facts or others or contents.step:
        nested["step"] = contents.step
        nested[OURS] = {"facts": msgspec.json.encode(contents.facts).decode(), "tensors": others}
    return nested, left_out


def _nest_optimizer(
    contents: Contents, states: dict[str, dict[str, Tensor]], *, numbered: bool
) -> tuple[dict[str, Any], list[str]]:
    groups = contents.groups
    if len(groups) == 1 and "params" not in groups[0] and len(states) == len(_parameters(contents.forms)):
        groups[0]["params"] = _parameters(contents.forms)
    members = [name for group in groups for name in group.get("params", ())]
    if not groups or not all("params" in group for group in groups) or states.keys() - set(members):
        reason = f"the checkpoint does not hold which of its {len(groups)} groups each parameter is in"
        return {"state": states}, [
            f"groups of the optimizer: {reason}, so its states are under names and without groups"
        ]
    if not numbered:
        return {"state": states, "param_groups": groups}, []
    number = {name: index for index, name in enumerate(members)}
    by_number = {number[name]: state for name, state in states.items()}
    for group in groups:
        group["param_names"] = group.pop("params")
        group["params"] = [number[name] for name in group["param_names"]]
    return {"state": dict(sorted(by_number.items())), "param_groups": groups}, []


def _inner(key: Key) -> Key:
    """Drop one outer name, such as the "app" under which a Stateful holds all."""
    return key[1:] if len(key) > 2 and key[0] not in _ROOTS and key[1] in _ROOTS else key


def _place(found: Sorted, name: str, key: Key) -> None:
    if name in found.places:
        both = " and ".join(".".join(map(str, each)) for each in (found.places[name], key))
        raise InputError(
            f"{both} are both {name!r}", code="checkpoint.tensor-name-collision", fix="convert a state of one model"
        )
    found.places[name] = key


def _state(inner: Key) -> tuple[str | int, str] | None:
    """Return parameter and key of an optimizer state, nested or flattened by torch's option."""
    if inner[0] not in OPTIMIZERS or len(inner) < 2:
        return None
    if len(inner) == 4 and inner[1] == "state":
        return inner[2], str(inner[3])
    if len(inner) == 2 and str(inner[1]).startswith("state."):
        parameter, _, key = str(inner[1]).removeprefix("state.").rpartition(".")
        return parameter, key
    return None


def _setting(inner: Key) -> Key | None:
    """Return group and key of an optimizer setting: the group is a number, or the name of a parameter."""
    if inner[0] not in OPTIMIZERS or len(inner) < 2:
        return None
    if len(inner) == 4 and inner[1] == "param_groups":
        return inner[2:]
    if len(inner) == 2 and str(inner[1]).startswith("param_groups."):
        parameter, _, key = str(inner[1]).removeprefix("param_groups.").rpartition(".")
        return parameter, key
    return None


def _groups(found: Sorted, settings: dict[Key, Key], value_of: Callable[[Key], Any]) -> list[dict[str, Any]]:
    """Return the parameter groups; of groups listed parameter by parameter, those with the same settings are one."""
    by_group: dict[str | int, dict[str, Any]] = {}
    for (group, name), key in settings.items():
        value = value_of(key)
        try:
            by_group.setdefault(group, {})[str(name)] = msgspec.json.decode(msgspec.json.encode(value))
        except (TypeError, msgspec.MsgspecError):
            found.left_out.append(f"{'.'.join(map(str, key))}: {type(value).__name__} is not a plain value")
    groups: dict[bytes, dict[str, Any]] = {}
    for group, values in by_group.items():
        if isinstance(group, int):
            groups[b"%d" % group] = values
        else:
            same = groups.setdefault(msgspec.json.encode(values, order="sorted"), {**values, "params": []})
            same["params"].append(group)
    return list(groups.values())


def _name_states(
    found: Sorted,
    states: dict[tuple[str | int, str], Key],
    groups: list[dict[str, Any]],
    forms: Mapping[Key, Form],
    prefix: str,
) -> None:
    """Place the optimizer's states, finding the names of parameters that are only numbered."""
    names: dict[str | int, str] = {each: each for each, _ in states if isinstance(each, str)}
    if any(isinstance(each, int) for each, _ in states):
        numbered = _numbered(found, states, groups, forms)
        if numbered is None:
            found.left_out.append("optimizer: its parameters are numbered, and which is which is not certain")
            return
        names |= numbered
    for (parameter, state), key in states.items():
        _place(found, f"{OPTIMIZER}{names[parameter].removeprefix(prefix)}/{state}", key)
    for group in groups:
        group.pop("param_names", None)
        if isinstance(group.get("params"), list):
            group["params"] = [names.get(each, str(each)).removeprefix(prefix) for each in group["params"]]
    if groups and "optimizer" not in found.facts:
        found.facts["optimizer"] = {"groups": groups}


def _numbered(
    found: Sorted, states: dict[tuple[str | int, str], Key], groups: list[dict[str, Any]], forms: Mapping[Key, Form]
) -> dict[str | int, str] | None:
    """Return the name of each numbered parameter: as in the groups, or the weights in order if all shapes agree."""
    named: dict[str | int, str] = {}
    for group in groups:
        if group.get("params") and group.get("param_names"):
            named.update(zip(group["params"], group["param_names"], strict=False))
    if named.keys() >= {each for each, _ in states}:
        return named
    mine = {name: forms[key] for name, key in found.places.items()}
    names, numbers = _parameters(mine), groups[0].get("params") if len(groups) == 1 else None
    if not isinstance(numbers, list) or numbers != list(range(len(names))):
        return None
    for (each, state), key in states.items():
        if state in _SHAPED and forms[key][1] != mine[MODEL + names[int(each)]][1]:
            return None
    return dict(enumerate(names))


def _parameters(forms: Mapping[str, Form]) -> list[str]:
    """Return the weights that an optimizer may have, in order: no known buffers and no integers."""
    return [
        name.removeprefix(MODEL)
        for name, (dtype, _) in forms.items()
        if name.startswith(MODEL) and not name.endswith(_BUFFERS) and "F" in dtype
    ]


def _unwrapper(found: Sorted) -> str:
    """Return the prefix that DDP or torch.compile adds to the names of all weights."""
    weights = [name.removeprefix(MODEL) for name in found.places if name.startswith(MODEL)]
    prefix = ""
    while weights and (more := next((each for each in _WRAPPERS if weights[0].startswith(prefix + each)), "")):
        if not all(name.startswith(prefix + more) for name in weights):
            break
        prefix += more
    return prefix


def _renamed(name: str, prefix: str) -> str:
    return MODEL + name.removeprefix(MODEL).removeprefix(prefix) if name.startswith(MODEL) else name


def _decode(text: Any) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, TypeError) as error:
        raise InputError(f"the facts in it are no JSON ({error})", code="checkpoint.facts-invalid") from None
    return facts


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
