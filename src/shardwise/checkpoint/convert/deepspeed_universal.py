"""DeepSpeed's universal checkpoint: a folder for each parameter, which any number of ranks can load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.checkpoint.convert.deepspeed import (
    LATEST_UNIVERSAL,
    MODEL_STATES,
    WEIGHTS,
    ZERO,
    Flat,
    Source,
    alone,
    is_flat,
    load_file,
    model_files,
    shapes_of,
)
from shardwise.checkpoint.convert.deepspeed_write import VERSION, DeepSpeedOptimizer, save
from shardwise.checkpoint.disk import sync_folder, write_synced
from shardwise.errors import InputError, some_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardwise.checkpoint.convert.contents import Contents

_GLOBAL = "optimizer_state.pt"
_ADAM = {"exp_avg", "exp_avg_sq"}


def read_universal(folder: Path) -> Source:
    """Return the contents of a universal checkpoint: as DeepSpeed's own script makes it, of any stage, or as we do."""
    model = load_file(model_files(folder)[0])
    saved = load_file(folder / ZERO / _GLOBAL)
    inner = saved.get("optimizer_state_dict") or {}
    settings = saved.get("param_groups") or inner.get("param_groups") or []
    states: dict[int, dict[str, Any]] = inner.get("state") or {}
    step = next((state.get("step") for state in states.values()), None)
    shapes = shapes_of(model, "param_shapes")
    group_of = {number: index for index, group in enumerate(settings) for number in group.get("params", ())}
    flats: dict[str, Flat] = {}
    for number, each in enumerate(shapes):
        for name, shape in each.items():
            values = _values(folder / ZERO / name, step)
            flats[name] = Flat(shape, group_of.get(number, 0), [(values, 0, torch.Size(shape).numel())])
    whole = {name: tensor for name, tensor in model["module"].items() if _is_whole(name, model, flats)}
    return Source(model, flats | {name: alone(tensor) for name, tensor in whole.items()}, settings)


def write(contents: Contents, path: Path) -> list[str]:
    """Write a universal checkpoint, one parameter at a time, and return what DeepSpeed would not load from it."""
    optimized = DeepSpeedOptimizer.of(contents)
    tag = f"global_step{contents.step}_universal"
    zero = path / tag / ZERO
    zero.mkdir(parents=True)
    others = optimized.others()
    states = optimized.model_states(others, num_ranks=1) | {"universal_checkpoint_info": {}}
    for name in (MODEL_STATES, f"zero_pp_rank_0_{MODEL_STATES}"):  # for stages 1 and 2, and for stage 3
        save(states, path / tag / name)
    step = torch.tensor(optimized.step)
    groups = [settings | {"params": [number]} for number, settings in enumerate(optimized.settings)]
    # Stages 1 and 2 read the groups and each parameter's step, stage 3 what is under optimizer_state_dict.
    inner = {"state": {0: {"step": step}}, "param_groups": groups}
    save({"param_groups": groups, "optimizer_state_dict": inner, "ds_version": VERSION}, zero / _GLOBAL)
    for name in (name for group in optimized.names for name in group):
        (zero / name).mkdir()
        save(step, zero / name / "step.pt")
        for key, tensor in optimized.read(name).items():
            save({"param": tensor.contiguous().clone(), "cat_dim": 0}, zero / name / f"{key}.pt")
    write_synced(path / LATEST_UNIVERSAL, tag.encode())
    for folder in (zero, path / tag, path):
        sync_folder(folder)
    return [*optimized.left_out(), *_unloaded(optimized, others)]


def _values(folder: Path, step: Any) -> Mapping[str, Any]:
    """Return the states of one parameter; those that stage 3 made have their step in one place for all."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.pt")):
        value = load_file(file)
        found[file.stem] = value["param"] if isinstance(value, dict) else value
    if WEIGHTS not in found:
        raise InputError(
            f"{folder} holds no {WEIGHTS}.pt", code="checkpoint.file-missing", fix="make the universal checkpoint again"
        )
    if len(found) > 1 and step is not None:
        found.setdefault("step", step)
    return found


def _is_whole(name: str, model: Mapping[str, Any], flats: Mapping[str, Flat]) -> bool:
    """Whether a tensor of the model states is a value: stage 3 leaves empty ones where parameters were."""
    aliases = model.get("shared_params") or {}
    tensor: Tensor = model["module"][name]
    return name not in flats and name not in aliases and (bool(tensor.numel()) or not is_flat(tensor))


def _unloaded(optimized: DeepSpeedOptimizer, others: Mapping[str, Tensor]) -> list[str]:
    """Return what DeepSpeed 0.19 leaves as it is when it loads a universal checkpoint."""
    left_out = []
    if others:
        left_out.append(
            f"{some_of(others)}: in the folder, but DeepSpeed loads only parameters of the optimizer from it"
        )
    differing = set()
    for group in optimized.settings:
        differing |= {key for key in group if group[key] != optimized.settings[0].get(key, group[key])}
    if differing:
        left_out.append(
            f"{', '.join(sorted(differing))} by group: at stage 3 DeepSpeed gives all groups the first one's,"
            " so set them again after loading, or convert with --zero 3 --nproc N"
        )
    if set(optimized.keys) != _ADAM:
        left_out.append("optimizer: at stage 3 DeepSpeed loads only Adam's; convert with --zero 3 --nproc N")
    return left_out
