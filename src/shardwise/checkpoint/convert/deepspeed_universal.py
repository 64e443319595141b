"""DeepSpeed universal checkpoints: one directory per parameter, loadable on any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.checkpoint.convert.deepspeed import (
    LATEST_UNIVERSAL,
    MODEL_STATES,
    WEIGHTS,
    ZERO,
    FlatTensor,
    ZeroFiles,
    contents_of_files,
    groups_by_number,
    is_flat,
    load_file,
    model_files,
    shapes_of,
    tag_directory,
    unpartitioned,
)
from shardwise.checkpoint.convert.deepspeed_write import VERSION, DeepSpeedOptimizer, save
from shardwise.checkpoint.disk import sync_directory, write_synced
from shardwise.errors import InputError, some_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardwise.checkpoint.convert.contents import Contents

_GLOBAL = "optimizer_state.pt"
_ADAM = {"exp_avg", "exp_avg_sq"}


def read(path: Path) -> Contents:
    """Return the contents of a universal checkpoint, converted from any ZeRO stage by DeepSpeed or written here."""
    directory = tag_directory(path)
    model = load_file(model_files(directory)[0])
    saved = load_file(directory / ZERO / _GLOBAL)
    inner = saved.get("optimizer_state_dict") or {}
    settings = saved.get("param_groups") or inner.get("param_groups") or []
    states: dict[int, dict[str, Any]] = inner.get("state") or {}
    step = next(iter(states.values()), {}).get("step")
    group_of = groups_by_number(settings)
    flats: dict[str, FlatTensor] = {}
    for number, shapes in enumerate(shapes_of(model, "param_shapes")):
        for name, shape in shapes.items():
            values = _values(directory / ZERO / name, step)
            flats[name] = FlatTensor(shape, group_of.get(number, 0), [(values, 0, torch.Size(shape).numel())])
    for name, tensor in model["module"].items():
        if _is_unpartitioned(name, model, flats):
            flats[name] = unpartitioned(tensor)
    return contents_of_files(ZeroFiles(model, flats, settings))


def write(contents: Contents, path: Path) -> list[str]:
    """Write a universal checkpoint, one parameter at a time, and return the contents that DeepSpeed does not load."""
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
    # Stages 1 and 2 read the groups and the step of each parameter, stage 3 reads optimizer_state_dict.
    inner = {"state": {0: {"step": step}}, "param_groups": groups}
    save({"param_groups": groups, "optimizer_state_dict": inner, "ds_version": VERSION}, zero / _GLOBAL)
    for name in optimized.all_names():
        (zero / name).mkdir()
        save(step, zero / name / "step.pt")
        for key, tensor in optimized.read(name).items():
            save({"param": tensor.contiguous().clone(), "cat_dim": 0}, zero / name / f"{key}.pt")
    write_synced(path / LATEST_UNIVERSAL, tag.encode())
    for directory in (zero, path / tag, path):
        sync_directory(directory)
    return [*optimized.left_out(), *_unloaded(optimized, others)]


def _values(directory: Path, step: Any) -> Mapping[str, Any]:
    """Return the optimizer states of one parameter, with the common step if a stage 3 checkpoint was converted."""
    found: dict[str, Any] = {}
    for file in sorted(directory.glob("*.pt")):
        value = load_file(file)
        found[file.stem] = value["param"] if isinstance(value, dict) else value
    if WEIGHTS not in found:
        raise InputError(
            f"{directory} does not contain {WEIGHTS}.pt",
            code="checkpoint.file-missing",
            fix="create the universal checkpoint again",
        )
    if len(found) > 1 and step is not None:
        found.setdefault("step", step)
    return found


def _is_unpartitioned(name: str, model: Mapping[str, Any], flats: Mapping[str, FlatTensor]) -> bool:
    """Return whether the model states contain the values of a tensor; stage 3 has empty tensors for parameters."""
    aliases = model.get("shared_params") or {}
    tensor: Tensor = model["module"][name]
    return name not in flats and name not in aliases and (bool(tensor.numel()) or not is_flat(tensor))


def _unloaded(optimized: DeepSpeedOptimizer, others: Mapping[str, Tensor]) -> list[str]:
    """Return the contents that DeepSpeed 0.19 ignores when it loads a universal checkpoint."""
    left_out = []
    if others:
        left_out.append(f"{some_of(others)}: written, but DeepSpeed loads only parameters of the optimizer")
    differing = set()
    for group in optimized.settings:
        differing |= {key for key in group if group[key] != optimized.settings[0].get(key, group[key])}
    if differing:
        left_out.append(
            f"{', '.join(sorted(differing))} by group: at stage 3 DeepSpeed applies the values of the first group to"
            " all groups; set them after loading, or convert with --zero 3 --nproc N"
        )
    if set(optimized.keys) != _ADAM:
        left_out.append("optimizer: at stage 3 DeepSpeed loads only Adam states; convert with --zero 3 --nproc N")
    return left_out
