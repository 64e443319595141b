"""Checkpoints of a custom training loop: models, optimizers and any object with a state dict, under any plan.

Every value is saved under a name that does not depend on a rank. As in `train`, weights are named model/NAME and
optimizer states optimizer/PARAMETER/KEY, so they can be loaded at a different world size, under a different strategy,
by `train` and by `shardwise checkpoint`. Shards are DTensors: every rank writes and reads its local tensors. The state
dict of any other object is stored as JSON in the manifest, and its tensors as tensors of the checkpoint; pickle is not
used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import MismatchError, load_newest
from shardwise.checkpoint import save as save_tensors
from shardwise.checkpoint.convert.convert import KINDS
from shardwise.checkpoint.manifest import DTYPES
from shardwise.errors import InputError, nearest, some_of
from shardwise.parallel.collectives import stages_of
from shardwise.parallel.optimizer import Optimized
from shardwise.spec import local_path
from shardwise.training.saving import state_of
from shardwise.training.state import USER, is_plain, plain_states, restore_plain_states, user_load_targets
from shardwise.training.step.module_step import make_states, states_of

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from pathlib import Path

    from shardwise.checkpoint import Manifest, SaveReport
    from shardwise.training.step.module_step import Forms
    from shardwise.training.step.step import Step

_OWN = "own"
"""Manifest key of the state dicts and plain values of objects that are neither models nor optimizers."""


def save(folder: Path | str, state: Mapping[str, Any] | Step, *, step: int = 0) -> SaveReport:
    """Save `state` as `folder`/step-NNNNNNNN. Communicates over the world; call on every rank.

    `state` maps names to models, optimizers, objects with a state_dict (a loader, a schedule) and plain values. Name
    the model "model" and its optimizer "optimizer" if `train` or `shardwise checkpoint` must read them. `state` may
    also be a step of `build_step`, which is saved in the format of `train`; `build_step(resume=folder)` resumes it.
    Either every rank returns and the checkpoint is durable, or every rank raises the same error.
    """
    if not isinstance(state, Mapping):
        tensors, facts = state_of(state, {})
        return save_tensors(local_path(folder), state.number, tensors, facts, group=_group())
    parts = _StateParts(state)
    return save_tensors(local_path(folder), step, parts.tensors(), parts.facts(step), group=_group())


def load(path: Path | str, state: MutableMapping[str, Any]) -> int | None:
    """Load the newest intact checkpoint at `path` into `state`. Communicates over the world; call on every rank.

    `path` is a directory of checkpoints, one checkpoint, or a run directory, saved at any world size under any
    strategy. Models and optimizers are loaded in place, objects with a load_state_dict receive their state, and plain
    values of `state` are replaced. Returns the step of the checkpoint; returns None and leaves `state` unchanged if
    `path` contains no checkpoint, and raises InputError if it is a checkpoint of another format.
    """
    parts, path = _StateParts(state), local_path(path)
    report = load_newest(path, parts.load_targets, group=_group(), strict=False)
    if report is None:
        _refuse_foreign(path)
        return None
    state.update(parts.restore(report.facts))
    return report.step


def _refuse_foreign(path: Path) -> None:
    """Raise InputError if a path without a checkpoint of shardwise has one of another format, such as transformers'."""
    for place in (path, *sorted(path.glob("checkpoint-*"))):
        for kind in KINDS.values():
            if kind.is_at(place):
                raise InputError(
                    f"{place} is not a checkpoint of shardwise, but {kind.description}",
                    code="checkpoint.foreign-format",
                    fix=f"run shardwise checkpoint convert {place} NEW --to shardwise, and load NEW",
                )


def _group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


class _StateParts:
    """A state mapping, grouped into models, their optimizers, and other values."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
        names: dict[int, str] = {}
        for key, model in self._models.items():
            for name, value in _values(model)[0].items():
                if key != "model":
                    name = f"{key}.{name}"  # noqa: PLW2901 - the same name with its model's key
                names[id(value)] = name
        self._optimizers: dict[str, Optimized] = {}
        self._others: dict[str, Any] = {}
        self._loaded: dict[str, Tensor] = {}
        """Tensors of other values, allocated to load a checkpoint into."""
        for key, value in state.items():
            if isinstance(value, Optimizer):
                self._optimizers[key] = _named(key, value, names)
            elif key not in self._models:
                self._others[key] = value

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors by name, without copies."""
        found: dict[str, Tensor] = {}
        for key, model in self._models.items():
            for name, value in _values(model)[0].items():
                found[f"{key}/{name}"] = value.detach()
        for key, optimized in self._optimizers.items():
            for name, value in states_of(optimized).items():
                found[f"{key}/{name}"] = value
        for key, value in self._others.items():
            _encode(_state_of(value), key, found)
        return found

    def facts(self, step: int) -> dict[str, Any]:
        """Return the manifest facts besides tensors; "optimizer" and "tied" have the format of `train`."""
        facts: dict[str, Any] = {"step": step, "torch": str(torch.__version__), "models": list(self._models)}
        facts[_OWN] = {key: _encode(_state_of(value), key, {}) for key, value in self._others.items()}
        if "model" in self._models:
            facts["tied"] = _values(self._models["model"])[1]
        optimizers = {key: _optimizer_facts(optimized) for key, optimized in self._optimizers.items()}
        if "optimizer" in optimizers:
            facts["optimizer"] = optimizers.pop("optimizer")
        return facts | {"optimizers": optimizers}

    def load_targets(self, manifest: Manifest) -> dict[str, Tensor]:
        """Return the tensors to load a checkpoint into; raise, with `state` unchanged, if names or shapes differ."""
        self._check_parts(manifest.facts)
        forms = {name: (entry.shape, DTYPES[entry.dtype]) for name, entry in manifest.tensors.items()}
        self._check_forms(forms)
        for key, optimized in self._optimizers.items():
            make_states(optimized, _under(f"{key}/", forms))
        now = self.tensors()
        others = tuple(f"{USER}{key}/" for key in self._others)
        self._loaded = user_load_targets({name: form for name, form in forms.items() if name.startswith(others)}, now)
        return {name: value for name, value in now.items() if not name.startswith(USER)} | self._loaded

    def restore(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Restore the state that is not stored in tensors, and return the plain values by key."""
        for key, optimized in self._optimizers.items():
            _restore_optimizer(optimized, _saved_optimizers(facts)[key])
        plain: dict[str, Any] = {}
        for key, value in self._others.items():
            loaded = _decode(facts[_OWN][key], self._loaded)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(loaded)
            else:
                plain[key] = loaded
        return plain

    def _check_parts(self, facts: Mapping[str, Any]) -> None:
        """Raise InputError if the checkpoint lacks a key of the state; `train` saves "model" and "optimizer"."""
        saved = [*facts.get("models", ["model"]), *_saved_optimizers(facts), *facts.get(_OWN, {})]
        for key in (*self._models, *self._optimizers, *self._others):
            if key not in saved:
                raise InputError(
                    f"the checkpoint has no key {key!r}", code="checkpoint.part-missing", fix=nearest(key, saved)
                )

    def _check_forms(self, forms: Forms) -> None:
        """Raise MismatchError if names, shapes or dtypes of weights, or the parameters of an optimizer, differ."""
        found: list[str] = []
        for key, model in self._models.items():
            saved = _under(f"{key}/", forms)
            here = {name: (tuple(value.shape), value.dtype) for name, value in _values(model)[0].items()}
            found += [f"{key}/{name}" for name in {**saved, **here} if saved.get(name) != here.get(name)]
        for key, optimized in self._optimizers.items():
            known = dict(optimized.named)
            found += [f"{key}/{name}" for name in _under(f"{key}/", forms) if name.rpartition("/")[0] not in known]
        if found:
            raise MismatchError(
                f"the checkpoint was saved with a different model or optimizer: {some_of(found)}",
                code="checkpoint.tensors-mismatch",
                fix="load into the same models and optimizers that were saved",
            )


def _under(prefix: str, forms: Forms) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name.removeprefix(prefix): form for name, form in forms.items() if name.startswith(prefix)}


# Models: parameters and persistent buffers, each saved under its first name.


def _values(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a model by their first name, and a map from each alias of a tied tensor to that name."""
    values: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for stage in stages_of(model):
        for name, value in stage.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise InputError(
                    f"{name} in the model's state dict must be a tensor, got {type(value).__name__}",
                    code="checkpoint.extra-state",
                    fix="save this value under a separate key of the state",
                )
            original = first.setdefault(id(value), name)
            if original == name:
                values[name] = value
            else:
                tied[name] = original
    return values, tied


# Optimizers: states by parameter name, and the options of parameter groups.


def _named(key: str, optimizer: Optimizer, names: Mapping[int, str]) -> Optimized:
    """Return an optimizer with its parameter names; raise InputError if the state lacks the model of a parameter."""
    named: list[tuple[str, nn.Parameter]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise InputError(
                    f"{key!r} has a parameter of shape {list(parameter.shape)} that is in no model of the state",
                    code="checkpoint.optimizer-without-model",
                    fix="add the model to the state, and create the optimizer after parallelize",
                )
            named.append((names[id(parameter)], parameter))
    return Optimized(optimizer=optimizer, named=named)


def _optimizer_facts(optimized: Optimized) -> dict[str, Any]:
    groups = []
    for settings, names in zip(optimized.param_groups, optimized.group_names(), strict=True):
        kept: dict[str, Any] = {}
        for key, value in settings.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()  # noqa: PLW2901 - a learning rate in a tensor
            if key != "params" and is_plain(value):
                kept[key] = value
        groups.append(kept | {"params": names})
    return {"class": optimized.kind, "groups": groups, "values": plain_states(optimized)}


def _saved_optimizers(facts: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(facts.get("optimizers", {}))
    if "optimizer" in facts:
        found["optimizer"] = facts["optimizer"]
    return found


def _restore_optimizer(optimized: Optimized, saved: Mapping[str, Any]) -> None:
    """Restore the saved options of parameter groups (such as the current learning rate) and plain optimizer values."""
    for group, settings in zip(optimized.param_groups, saved.get("groups", ()), strict=False):
        for key in settings.keys() & group.keys() - {"params"}:
            if isinstance(group[key], Tensor):
                group[key].fill_(settings[key])
            elif isinstance(group[key], tuple):
                group[key] = tuple(settings[key])
            else:
                group[key] = settings[key]
    restore_plain_states(optimized, saved.get("values", {}))


# Other objects: the state dict encoded as JSON without loss; tensors are referenced by name.


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value encoded for JSON and add its tensors to `tensors`; raise InputError for unsupported types."""
    if isinstance(value, Tensor):
        tensors[USER + path] = value.detach()
        return {"$tensor": USER + path}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in {str, int}:
                raise InputError(
                    f"{path} has the unsupported key {key!r}",
                    code="checkpoint.value-unsupported",
                    fix="use str and int keys",
                )
        items = [[key, _encode(each, f"{path}/{key}", tensors)] for key, each in value.items()]
        if type(value) is Counter or not all(type(key) is str and not key.startswith("$") for key in value):
            return {"$counter" if isinstance(value, Counter) else "$dict": items}
        return dict(items)
    if isinstance(value, list | tuple):
        values = [_encode(each, f"{path}/{number}", tensors) for number, each in enumerate(value)]
        return values if isinstance(value, list) else {"$tuple": values}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is not None and type(value) not in {str, int, float, bool}:
        raise InputError(
            f"{path} has the unsupported type {type(value).__module__}.{type(value).__qualname__}",
            code="checkpoint.value-unsupported",
            fix="use tensors, dicts, lists, tuples, str, numbers, bool and None, or an object with a state_dict",
        )
    return value


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `_encode` encoded."""
    if isinstance(value, list):
        return [_decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    for kind, decode in _DECODERS.items():
        if kind in value:
            return decode(value[kind], tensors)
    return {key: _decode(each, tensors) for key, each in value.items()}


def _pairs(items: list[Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {key: _decode(each, tensors) for key, each in items}


_DECODERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$tensor": lambda name, tensors: tensors[name],
    "$float": lambda text, _: float(text),
    "$tuple": lambda values, tensors: tuple(_decode(values, tensors)),
    "$dict": _pairs,
    "$counter": lambda items, tensors: Counter(_pairs(items, tensors)),
}
"""Decoders of values that JSON cannot represent, by the single key of the JSON object that encodes them."""
