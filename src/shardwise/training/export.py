"""Exporting: the trained weights as one plain file, and adapters as a folder that peft reads, from any strategy."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.checkpoint.agreement import nothing_more, together
from shardwise.checkpoint.convert.peft import write_adapters
from shardwise.checkpoint.disk import remove_whole
from shardwise.errors import JobError
from shardwise.job.engine import is_mlx
from shardwise.job.lora import is_adapter
from shardwise.parallel.apply import stages_of
from shardwise.parallel.gather import full_values
from shardwise.runs.disk import write_error
from shardwise.training.step.whole import adapter_facts, from_all, whole_weights

if TYPE_CHECKING:
    from typing import IO

    from torch import Tensor, nn


def export(model: nn.Module, path: Path | str) -> None:
    """Write the model's whole state dict to `path` on rank 0; called on every rank, communicates over the world.

    Adapters are merged into the weights they stand beside: the file is of the user's own model.
    `torch.load(path, weights_only=True)` reads it without shardwise. The file appears whole or not at all, replacing
    one that is there; if it cannot be written, every rank raises the same CheckpointError.
    """
    if is_mlx(model):
        raise JobError(
            "export writes models of torch, and this one is MLX's",
            code="support.mlx-export",
            fix='use model.save_weights("model.safetensors"), or weights.pt of the run',
        )
    write_weights(whole_weights(model), path)


def write_weights(weights: dict[str, Tensor], path: Path | str) -> None:
    """Write rank 0's whole weights to `path` as `export` does; called on every rank, communicates over the world."""
    path = Path(path)
    group = dist.group.WORLD if dist.is_initialized() else None
    together(group, f"exporting {path}", lambda: _write(weights, path) if weights else None, nothing_more)


def export_adapters(model: nn.Module, folder: Path | str, *, base: str | None = None) -> None:
    """Write the adapters of `model` as peft does, on rank 0; called on every rank, communicates over the world.

    `base` is where the frozen weights came from, for the file to say. The folder appears whole or not at all, replacing
    one that is there.
    """
    folder = Path(folder)
    lora = adapter_facts(model)
    if lora is None:
        raise JobError(
            "the model has no adapters", code="model.no-adapters", fix="train a job with lora=, or use export"
        )
    trained = full_values(
        item for stage in stages_of(model) for item in stage.named_parameters() if is_adapter(item[0])
    )
    names = [name for stage in stages_of(model) for name in stage.state_dict(keep_vars=True) if not is_adapter(name)]
    frozen = [name for theirs in from_all(names) for name in theirs]
    group = dist.group.WORLD if dist.is_initialized() else None

    def write() -> None:
        draft = folder.with_name(f".exporting-{folder.name}-{secrets.token_hex(4)}")
        try:
            write_adapters(draft, trained, frozen, {**lora, "base": base})
            if folder.is_dir():
                remove_whole(folder)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    together(group, f"exporting {folder}", write if trained else lambda: None, nothing_more)


def _write(weights: dict[str, Tensor], path: Path) -> None:
    draft = path.with_name(f".exporting-{path.name}-{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            _save(weights, file, path)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _save(weights: dict[str, Tensor], file: IO[bytes], path: Path) -> None:
    try:
        torch.save(weights, file)
    except RuntimeError as error:
        cause = write_error(path.parent)  # torch reports that its file is shorter than it wrote, and not why
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
