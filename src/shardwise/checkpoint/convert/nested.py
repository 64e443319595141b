"""Conversion between shardwise tensor names and the nested state dicts that training scripts save with torch.

torch.save files and torch.distributed.checkpoint directories have the same structure: {"model": {name: tensor},
"optimizer": {"state": ..., "param_groups": ...}}, possibly one level deeper, or with the weights at the top level.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.checkpoint.convert.contents import MODEL, OPTIMIZER, Contents, short_names
from shardwise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from shardwise.checkpoint.manifest import Form

Key = tuple[str | int, ...]
"""The path of keys to a value in a nested state dict."""

MODELS = frozenset({"model", "model_state_dict", "state_dict"})
OPTIMIZERS = frozenset({"optimizer", "optim", "optimizer_state_dict", "optim_state_dict"})
STEPS = frozenset({"step", "global_step", "num_steps", "iteration"})
OURS = "shardwise"
"""Key of the facts, as JSON, and of tensors that are neither weights nor optimizer states."""
_ROOTS = MODELS | OPTIMIZERS | {OURS}
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DDP and torch.compile add to parameter names."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_SHAPED = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"})
"""Optimizer states with the shape of their parameter."""


@dataclass
class ParsedState:
    """A nested state dict, parsed into shardwise tensor names and facts."""

    keys: dict[str, Key] = field(default_factory=dict)
    """Key of each tensor by its shardwise name."""
    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, key: Key) -> None:
        """Add a tensor; raise an InputError if another tensor has the same name."""
        if name in self.keys:
            raise InputError(
                f"{dotted(self.keys[name])} and {dotted(key)} both map to {name!r}",
                code="checkpoint.tensor-name-collision",
                fix="convert the state dict of a single model",
            )
        self.keys[name] = key

    def weights(self) -> dict[str, Key]:
        """Return the keys of the model weights by parameter name."""
        return short_names({name: key for name, key in self.keys.items() if name.startswith(MODEL)})


def dotted(key: Key) -> str:
    """Return a key as one dotted name."""
    return ".".join(map(str, key))


def parse_state(
    forms: Mapping[Key, Form],
    values: Iterable[Key],
    value_of: Callable[[Key], Any],
    *,
    same: Mapping[Key, Key] | None = None,
) -> ParsedState:
    """Parse a nested state dict; `value_of` is called only for values that are needed.

    Unsupported keys are listed in `left_out`. `same` maps a tensor to an earlier tensor that shares its memory.
    """
    inner_keys = {key: _inner(key) for key in (*forms, *values)}
    has_model = any(inner[0] in MODELS and len(inner) > 1 for inner in inner_keys.values())
    found = ParsedState()
    states: dict[tuple[str | int, str], Key] = {}
    settings: dict[Key, Key] = {}
    for key, inner in inner_keys.items():
        if inner[0] in MODELS and len(inner) > 1 and key in forms:
            found.add(MODEL + dotted(inner[1:]), key)
        elif len(inner) == 1 and key in forms and not has_model:
            found.add(MODEL + str(inner[0]), key)
        elif (state := _optimizer_entry(inner, "state")) is not None and key in forms:
            states[state[0], str(state[1])] = key
        elif (setting := _optimizer_entry(inner, "param_groups")) is not None and key not in forms:
            settings[setting] = key
        elif inner[:2] == (OURS, "tensors") and key in forms:
            found.add(dotted(inner[2:]), key)
        elif inner == (OURS, "facts") and key not in forms:
            found.facts = _decode(value_of(key))
        elif len(inner) == 1 and inner[0] in STEPS and key not in forms:
            found.step = _number(value_of(key))
        else:
            found.left_out.append(f"{dotted(key)}: not supported by shardwise checkpoints")
    prefix = _wrapper_prefix(list(found.weights()))
    found.keys = {_without_prefix(name, prefix): key for name, key in found.keys.items()}
    _tie(found, same or {})
    _name_states(found, states, _groups(found, settings, value_of), forms, prefix)
    return found


def _tie(found: ParsedState, same: Mapping[Key, Key]) -> None:
    """Replace weights that share memory with another weight by an entry in the fact `tied`."""
    names = {key: name for name, key in found.weights().items()}
    tied = {names[key]: names[other] for key, other in same.items() if key in names and other in names}
    if tied:
        found.facts["tied"] = tied
    known = found.facts.get("tied")
    if isinstance(known, dict):
        for alias in known:
            found.keys.pop(MODEL + alias, None)


def contents_of(kind: str, found: ParsedState, forms: Mapping[Key, Form], read: Callable[[Key], Tensor]) -> Contents:
    """Return the contents of a parsed state dict; `read` returns the unsharded tensor of a key."""
    keys = found.keys
    contents = Contents(
        kind=kind,
        step=found.step,
        forms={name: forms[key] for name, key in keys.items()},
        facts=found.facts,
        read=lambda names: {name: read(keys[name]) for name in names},
        left_out=tuple(found.left_out),
    )
    return contents if contents.step else dataclasses.replace(contents, step=_optimizer_steps(contents))


def _optimizer_steps(contents: Contents) -> int:
    """Return the largest step count in the optimizer states, or 0 if they have none."""
    names = [state["step"] for state in contents.states().values() if "step" in state]
    steps = [int(tensor.item()) for tensor in contents.read(names).values() if tensor.numel() == 1]
    return max(steps, default=0)


def nest(contents: Contents, tensors: Mapping[str, Tensor], *, numbered: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the nested state dict of `contents` with the given tensors, and the contents that it cannot represent.

    If `numbered`, optimizer states are keyed by parameter position, as in torch.optim; otherwise by parameter name, as
    in torch's get_optimizer_state_dict.
    """
    model = short_names({name: tensors[name] for name in contents.weights})
    for alias, name in contents.tied.items():
        model[alias] = model[name]
    nested: dict[str, Any] = {"model": model}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith((MODEL, OPTIMIZER))}
    left_out: list[str] = []
    states = {}
    for parameter, state in contents.states().items():
        states[parameter] = {key: tensors[name] for key, name in state.items()}
    if states:
        nested["optimizer"], left_out = _nest_optimizer(contents, states, numbered=numbered)
    if contents.facts.keys() - {"tied"} or others or contents.step:
        nested["step"] = contents.step
        nested[OURS] = {"facts": msgspec.json.encode(contents.facts).decode(), "tensors": others}
    return nested, left_out


def _nest_optimizer(
    contents: Contents, states: dict[str, dict[str, Tensor]], *, numbered: bool
) -> tuple[dict[str, Any], list[str]]:
    groups = contents.groups
    if len(groups) == 1 and "params" not in groups[0] and len(states) == len(_parameters(contents.forms)):
        groups[0]["params"] = _parameters(contents.forms)
    num_groups = len(groups)
    number: dict[str, int] = {}
    for group in groups:
        for name in group.get("params", ()):
            number[name] = len(number)
    num_named = sum("params" in group for group in groups)
    if not groups or num_named < num_groups or states.keys() - number.keys():
        reason = f"the checkpoint does not assign its parameters to the {num_groups} groups"
        return {"state": states}, [f"parameter groups of the optimizer: {reason}, so states are written without groups"]
    if not numbered:
        return {"state": states, "param_groups": groups}, []
    by_number = {number[name]: state for name, state in states.items()}
    for group in groups:
        group["param_names"] = group.pop("params")
        group["params"] = [number[name] for name in group["param_names"]]
    return {"state": dict(sorted(by_number.items())), "param_groups": groups}, []


def _inner(key: Key) -> Key:
    """Remove one outer key, such as the name under which DCP saved a Stateful application object."""
    return key[1:] if len(key) > 2 and key[0] not in _ROOTS and key[1] in _ROOTS else key


def _optimizer_entry(inner: Key, part: str) -> Key | None:
    """Return the last two keys of an entry in the `part` of an optimizer state dict; None for any other entry.

    They are a parameter and a state key for "state", and a group and an option for "param_groups". State dicts that
    torch flattened have one key "PART.PARAMETER.KEY": the options of a group are stored for each of its parameters.
    """
    if inner[0] not in OPTIMIZERS or len(inner) < 2:
        return None
    if len(inner) == 4 and inner[1] == part:
        return inner[2:]
    if len(inner) == 2 and str(inner[1]).startswith(f"{part}."):
        parameter, _, key = str(inner[1]).removeprefix(f"{part}.").rpartition(".")
        return parameter, key
    return None


def _groups(found: ParsedState, settings: dict[Key, Key], value_of: Callable[[Key], Any]) -> list[dict[str, Any]]:
    """Return the parameter groups; in a flattened state dict, parameters with the same options form a group."""
    by_group: dict[str | int, dict[str, Any]] = {}
    for (group, name), key in settings.items():
        value = value_of(key)
        try:
            by_group.setdefault(group, {})[str(name)] = msgspec.json.decode(msgspec.json.encode(value))
        except (TypeError, msgspec.MsgspecError):
            found.left_out.append(f"{dotted(key)}: a {type(value).__name__} cannot be stored as JSON")
    groups: dict[bytes, dict[str, Any]] = {}
    for group, values in by_group.items():
        if isinstance(group, int):
            groups[b"%d" % group] = values
        else:
            same = groups.setdefault(msgspec.json.encode(values, order="sorted"), {**values, "params": []})
            same["params"].append(group)
    return list(groups.values())


def _name_states(
    found: ParsedState,
    states: dict[tuple[str | int, str], Key],
    groups: list[dict[str, Any]],
    forms: Mapping[Key, Form],
    prefix: str,
) -> None:
    """Add the optimizer states, resolving the names of numbered parameters."""
    names: dict[str | int, str] = {each: each for each, _ in states if isinstance(each, str)}
    if any(isinstance(each, int) for each, _ in states):
        numbered = _numbered(found, states, groups, forms)
        if numbered is None:
            found.left_out.append("optimizer: its parameters are numbered, and their names cannot be determined")
            return
        names |= numbered
    for (parameter, state), key in states.items():
        found.add(f"{OPTIMIZER}{names[parameter].removeprefix(prefix)}/{state}", key)
    for group in groups:
        group.pop("param_names", None)
        if isinstance(group.get("params"), list):
            group["params"] = [names.get(each, str(each)).removeprefix(prefix) for each in group["params"]]
    if groups and "optimizer" not in found.facts:
        found.facts["optimizer"] = {"groups": groups}


def _numbered(
    found: ParsedState,
    states: dict[tuple[str | int, str], Key],
    groups: list[dict[str, Any]],
    forms: Mapping[Key, Form],
) -> dict[str | int, str] | None:
    """Return the name of each numbered parameter, or None if the names are unknown.

    The groups may list the names. Otherwise, numbers follow the order of the weights, which is accepted only if there
    is a single group and all shapes match.
    """
    named: dict[str | int, str] = {}
    for group in groups:
        if group.get("params") and group.get("param_names"):
            named.update(zip(group["params"], group["param_names"], strict=False))
    if named.keys() >= {each for each, _ in states}:
        return named
    found_forms = {name: forms[key] for name, key in found.keys.items()}
    names = _parameters(found_forms)
    if len(groups) != 1 or groups[0].get("params") != list(range(len(names))):
        return None
    for (parameter, state), key in states.items():
        if state in _SHAPED and forms[key][1] != found_forms[MODEL + names[int(parameter)]][1]:
            return None
    return dict(enumerate(names))


def _parameters(forms: Mapping[str, Form]) -> list[str]:
    """Return the names of the weights that an optimizer may update: floating-point tensors except known buffers."""
    found = []
    for name, (dtype, _) in forms.items():
        if name.startswith(MODEL) and not name.endswith(_BUFFERS) and "F" in dtype:
            found.append(name.removeprefix(MODEL))
    return found


def _wrapper_prefix(weights: list[str]) -> str:
    """Return the prefix that DDP and torch.compile have added to the names of all weights."""
    prefix = ""
    while weights:
        longer = [prefix + wrapper for wrapper in _WRAPPERS if weights[0].startswith(prefix + wrapper)]
        if not longer or not all(name.startswith(longer[0]) for name in weights):
            break
        prefix = longer[0]
    return prefix


def _without_prefix(name: str, prefix: str) -> str:
    return MODEL + name.removeprefix(MODEL + prefix) if name.startswith(MODEL) else name


def _decode(text: Any) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, TypeError) as error:
        raise InputError(
            f"the shardwise.facts of the checkpoint must be valid JSON ({error})", code="checkpoint.facts-invalid"
        ) from None
    return facts


def _number(value: Any) -> int:
    """Return the value if it is a non-negative int, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
