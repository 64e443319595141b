"""Checkpoints of a training loop of one's own: models, optimizers and anything with a state dict, under any plan.

The idea: every value is saved under a name that has no rank in it. Weights are model/NAME and optimizer states
optimizer/PARAMETER/KEY, as `train` saves them, so that another world size, another strategy, `train` and
`shardwise checkpoint` read them. Shards are DTensors, of which every rank writes and reads its own part. Of any other
object the state dict becomes JSON in the manifest, its tensors become tensors of the checkpoint; nothing is pickled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import MismatchError, load_newest
from shardwise.checkpoint import save as save_tensors
from shardwise.checkpoint.manifest import DTYPES
from shardwise.errors import InputError, nearest, some_of
from shardwise.parallel.collectives import stages_of
from shardwise.parallel.optimizer import Optimized
from shardwise.training.saving import state_of
from shardwise.training.state import USER, is_plain, plain_states, restore_plain_states, room_for
from shardwise.training.step.module_step import make_states, states_of

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from shardwise.checkpoint import Manifest, SaveReport
    from shardwise.training.step.module_step import Forms
    from shardwise.training.step.step import Step

_OWN = "own"
"""The fact that holds state dicts and plain values, by key."""


def save(folder: Path | str, state: Mapping[str, Any] | Step, *, step: int = 0) -> SaveReport:
    """Save `state` as `folder`/step-NNNNNNNN; communicates over the world, called on every rank.

    `state` has a name for each thing: models, optimizers, anything with a state_dict (a loader, a schedule), and plain
    values. Call the model "model" and its optimizer "optimizer" where `train` or `shardwise checkpoint` are to read
    them. Or it is a step of `build_step`, saved as `train` saves it; `build_step(resume=folder)` continues from it.
    Either every rank returns and the checkpoint is durable, or every rank raises the same error.
    """
    if not isinstance(state, Mapping):
        tensors, facts = state_of(state, {})
        return save_tensors(folder, state.number, tensors, facts, group=_group())
    parts = _StateParts(state)
    return save_tensors(folder, step, parts.tensors(), parts.facts(step), group=_group())


def load(path: Path | str, state: MutableMapping[str, Any]) -> int | None:
    """Put the newest good checkpoint at `path` into `state`; communicates over the world, called on every rank.

    `path` is a folder of checkpoints, one of them, or a run directory, saved at any world size under any strategy.
    Models and optimizers are filled in place, what has a load_state_dict gets its state, plain values of `state` are
    replaced. Returns the step it was saved at, or None where there is no checkpoint, and nothing changes.
    """
    parts = _StateParts(state)
    report = load_newest(Path(path), parts.room, group=_group(), strict=False)
    if report is None:
        return None
    state.update(parts.restore(report.facts))
    return report.step


def _group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


class _StateParts:
    """What a state holds: models, optimizers over their parameters, and the rest."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
        names: dict[int, str] = {}
        for key, model in self._models.items():
            for name, value in _values(model)[0].items():
                names[id(value)] = name if key == "model" else f"{key}.{name}"
        self._optimizers: dict[str, Optimized] = {}
        self._others: dict[str, Any] = {}
        self._loaded: dict[str, Tensor] = {}
        """Tensors of the others that a load fills."""
        for key, value in state.items():
            if isinstance(value, Optimizer):
                self._optimizers[key] = _named(key, value, names)
            elif key not in self._models:
                self._others[key] = value

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors by name; no copies."""
        found: dict[str, Tensor] = {}
        for key, model in self._models.items():
            found |= {f"{key}/{name}": value.detach() for name, value in _values(model)[0].items()}
        for key, optimized in self._optimizers.items():
            found |= {f"{key}/{name}": value for name, value in states_of(optimized).items()}
        for key, value in self._others.items():
            _encode(_state_of(value), key, found)
        return found

    def facts(self, step: int) -> dict[str, Any]:
        """Return what the manifest holds beside tensors; "optimizer" and "tied" are as `train` has them."""
        facts: dict[str, Any] = {"step": step, "torch": str(torch.__version__), "models": list(self._models)}
        facts[_OWN] = {key: _encode(_state_of(value), key, {}) for key, value in self._others.items()}
        if "model" in self._models:
            facts["tied"] = _values(self._models["model"])[1]
        optimizers = {key: _optimizer_facts(optimized) for key, optimized in self._optimizers.items()}
        if "optimizer" in optimizers:
            facts["optimizer"] = optimizers.pop("optimizer")
        return facts | {"optimizers": optimizers}

    def room(self, manifest: Manifest) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint is to fill; refuses one of another model or optimizer, unchanged."""
        self._refuse_missing(manifest.facts)
        forms = {name: (entry.shape, DTYPES[entry.dtype]) for name, entry in manifest.tensors.items()}
        self._refuse_different(forms)
        for key, optimized in self._optimizers.items():
            make_states(optimized, _under(f"{key}/", forms))
        now = self.tensors()
        others = tuple(f"{USER}{key}/" for key in self._others)
        self._loaded = room_for({name: form for name, form in forms.items() if name.startswith(others)}, now)
        return {name: value for name, value in now.items() if not name.startswith(USER)} | self._loaded

    def restore(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Take over what was loaded beside tensors; returns the plain values."""
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

    def _refuse_missing(self, facts: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that lacks a part that is asked for; one of `train` has a model and an optimizer."""
        saved = [*facts.get("models", ["model"]), *_saved_optimizers(facts), *facts.get(_OWN, {})]
        for key in (*self._models, *self._optimizers, *self._others):
            if key not in saved:
                raise InputError(
                    f"the checkpoint has no part {key!r}", code="checkpoint.part-missing", fix=nearest(key, saved)
                )

    def _refuse_different(self, forms: Forms) -> None:
        """Refuse weights of other names, shapes or dtypes, and states of parameters that an optimizer does not have."""
        found: list[str] = []
        for key, model in self._models.items():
            saved = _under(f"{key}/", forms)
            here = {name: (tuple(value.shape), value.dtype) for name, value in _values(model)[0].items()}
            found += [f"{key}/{name}" for name in {**saved, **here} if saved.get(name) != here.get(name)]
        for key, optimized in self._optimizers.items():
            known = {name for name, _ in optimized.named}
            found += [f"{key}/{name}" for name in _under(f"{key}/", forms) if name.rpartition("/")[0] not in known]
        if found:
            raise MismatchError(
                f"the checkpoint is of another model or optimizer: {some_of(found)}",
                code="checkpoint.tensors-mismatch",
                fix="load into what was saved",
            )


def _under(prefix: str, forms: Forms) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name.removeprefix(prefix): form for name, form in forms.items() if name.startswith(prefix)}


# Models: parameters and persistent buffers, each under its first name.


def _values(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a model's own tensors by name, each once, and the other names of those that have several."""
    values: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for stage in stages_of(model):
        for name, value in stage.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise InputError(
                    f"{name} of the model is a {type(value).__name__}, not a tensor",
                    code="checkpoint.extra-state",
                    fix="save it under a key of its own",
                )
            original = first.setdefault(id(value), name)
            if original == name:
                values[name] = value
            else:
                tied[name] = original
    return values, tied


# Optimizers: states by the names of their parameters, and the settings of their groups.


def _named(key: str, optimizer: Optimizer, names: Mapping[int, str]) -> Optimized:
    """Return an optimizer with the names of its parameters; refuses one whose model is not saved beside it."""
    named: list[tuple[str, nn.Parameter]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise InputError(
                    f"{key!r} trains a parameter of shape {list(parameter.shape)} that is of no model of the state",
                    code="checkpoint.optimizer-without-model",
                    fix="put its model beside it, and make the optimizer after parallelize",
                )
            named.append((names[id(parameter)], parameter))
    return Optimized(optimizer=optimizer, named=named)


def _optimizer_facts(optimized: Optimized) -> dict[str, Any]:
    groups = []
    for settings, names in zip(optimized.param_groups, optimized.group_names(), strict=True):
        kept: dict[str, Any] = {}
        for key, value in settings.items():
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if key != "params" and is_plain(number):
                kept[key] = number
        groups.append(kept | {"params": names})
    return {"class": optimized.kind, "groups": groups, "values": plain_states(optimized)}


def _saved_optimizers(facts: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(facts.get("optimizers", {}))
    if "optimizer" in facts:
        found["optimizer"] = facts["optimizer"]
    return found


def _restore_optimizer(optimized: Optimized, saved: Mapping[str, Any]) -> None:
    """Give groups the settings they were saved with (a learning rate under way), and parameters their plain values."""
    for group, settings in zip(optimized.param_groups, saved.get("groups", ()), strict=False):
        for key in settings.keys() & group.keys() - {"params"}:
            if isinstance(group[key], Tensor):
                group[key].fill_(settings[key])
            elif isinstance(group[key], tuple):
                group[key] = tuple(settings[key])
            else:
                group[key] = settings[key]
    restore_plain_states(optimized, saved.get("values", {}))


# Other objects: a state dict as JSON that gives back the same values; tensors stand in it by name.


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, its tensors added to `tensors`; refuses by its path what JSON cannot give back."""
    if isinstance(value, Tensor):
        tensors[USER + path] = value.detach()
        return {"$tensor": USER + path}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in {str, int}:
                raise InputError(
                    f"{path} has the key {key!r}", code="checkpoint.value-unsupported", fix="use str and int as keys"
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
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}",
            code="checkpoint.value-unsupported",
            fix="use tensors, dicts, lists, tuples, str, numbers, bool and None, or an object with a state_dict",
        )
    return value


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `_encode` was given."""
    if isinstance(value, list):
        return [_decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    for kind, read in _READERS.items():
        if kind in value:
            return read(value[kind], tensors)
    return {key: _decode(each, tensors) for key, each in value.items()}


def _pairs(items: list[Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {key: _decode(each, tensors) for key, each in items}


_READERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$tensor": lambda name, tensors: tensors[name],
    "$float": lambda text, _: float(text),
    "$tuple": lambda values, tensors: tuple(_decode(values, tensors)),
    "$dict": _pairs,
    "$counter": lambda items, tensors: Counter(_pairs(items, tensors)),
}
"""What stands for values that JSON does not have: the one key of an object -> how its value is read."""
