"""Converting: every kind of checkpoint that is known, and from any of them to any other."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.adapters import merged, only_adapters
from shardwise.checkpoint.convert import dcp as convert_dcp
from shardwise.checkpoint.convert import deepspeed as convert_deepspeed
from shardwise.checkpoint.convert import deepspeed_universal
from shardwise.checkpoint.convert import deepspeed_write as deepspeed_ranks
from shardwise.checkpoint.convert import hugging_face as convert_hf
from shardwise.checkpoint.convert import mlx as convert_mlx
from shardwise.checkpoint.convert import own as convert_own
from shardwise.checkpoint.convert import peft as convert_peft
from shardwise.checkpoint.convert import torch_file as convert_torch
from shardwise.checkpoint.convert.contents import BATCH_BYTES, Contents, bytes_of, find_ties
from shardwise.checkpoint.convert.dcp import METADATA
from shardwise.checkpoint.convert.deepspeed import is_deepspeed
from shardwise.checkpoint.disk import sync_folder, write_synced
from shardwise.checkpoint.errors import explained, parse_name
from shardwise.checkpoint.folder import find_checkpoints
from shardwise.errors import InputError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class CheckpointFormat:
    """One kind of checkpoint: how to know it, read it and write it."""

    words: str
    is_at: Callable[[Path], bool]
    read: Callable[[Path], Contents]
    write: Callable[[Contents, Path], list[str]]
    """Writes to a path where nothing is, and returns what the target cannot hold, one sentence each."""
    max_held_bytes: int | None
    """Bytes of tensors that writing holds at a time, one tensor at least; None for all of them."""
    holds: Callable[[Contents], Contents] = lambda contents: contents
    """Returns what of all contents this kind can hold."""

    def host_peak_bytes(self, contents: Contents) -> int:
        """Return how many bytes of tensors are on the host at once while `contents` are written, about."""
        sizes = [bytes_of(form) for form in self.holds(contents).forms.values()]
        if self.max_held_bytes is None:
            return sum(sizes)
        return max(min(sum(sizes), self.max_held_bytes), max(sizes, default=0))


KINDS = {
    "shardwise": CheckpointFormat(
        "a checkpoint of ours, a folder of them or a run directory",
        lambda path: bool(find_checkpoints(path)),
        convert_own.read,
        convert_own.write,
        max_held_bytes=BATCH_BYTES,
    ),
    "dcp": CheckpointFormat(
        "a torch.distributed.checkpoint folder",
        lambda path: (path / METADATA).is_file(),
        convert_dcp.read,
        convert_dcp.write,
        max_held_bytes=None,
    ),
    "deepspeed": CheckpointFormat(
        "a DeepSpeed folder",
        is_deepspeed,
        convert_deepspeed.read,
        deepspeed_universal.write,
        max_held_bytes=BATCH_BYTES,
    ),
    "peft": CheckpointFormat(
        "a folder of adapters as peft has it",
        convert_peft.is_peft,
        convert_peft.read,
        convert_peft.write,
        max_held_bytes=None,
        holds=only_adapters,
    ),
    "mlx": CheckpointFormat(
        "a file of MLX weights",
        convert_mlx.is_mlx,
        convert_mlx.read,
        convert_mlx.write,
        max_held_bytes=None,
        holds=convert_mlx.holds,
    ),
    "hf": CheckpointFormat(
        "a Hugging Face folder of safetensors",
        lambda path: path.suffix == ".safetensors" or any(path.glob("*.safetensors")),
        convert_hf.read,
        convert_hf.write,
        max_held_bytes=convert_hf.MAX_FILE_BYTES,
        holds=Contents.only_weights,
    ),
    "torch": CheckpointFormat(
        "a torch file", Path.is_file, convert_torch.read, convert_torch.write, max_held_bytes=None
    ),
}
"""Tried in this order."""


@dataclass(frozen=True)
class TargetRanks:
    """For how many ranks and at which stage the ZeRO files of a DeepSpeed folder are."""

    stage: int
    num_ranks: int


@dataclass(frozen=True)
class ConvertReport:
    """What one conversion did."""

    source_kind: str
    target_kind: str
    path: Path
    step: int
    """Optimizer steps that the source had made, also where the target holds weights alone."""
    num_tensors: int
    num_bytes: int
    tied: dict[str, str]
    left_out: tuple[str, ...]
    """What of the source is not in the target, one sentence each."""
    moved: tuple[str, ...] = ()
    """Tensors whose axes stand in another order than in the source: what is taken for a convolution of MLX."""


def open_contents(path: Path | str) -> Contents:
    """Return what the checkpoint at `path` holds, whatever its kind; no code in it is run."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} is not there", code="checkpoint.not-found", fix="name a checkpoint")
    for kind in KINDS.values():
        if kind.is_at(path):
            return kind.read(path)
    raise InputError(
        f"{path} is no checkpoint that is known",
        code="checkpoint.format-unrecognized",
        fix=f"name {', '.join(kind.words for kind in KINDS.values())}",
    )


def convert(
    source: Path | str,
    target: Path | str,
    to: str,
    *,
    weights: bool = False,
    step: int | None = None,
    config: Path | None = None,
    cut: TargetRanks | None = None,
    announce: Callable[[int], None] = lambda _: None,
) -> ConvertReport:
    """Write the checkpoint at `source` as a new one of kind `to` at `target`, whole or not at all; one process.

    `weights` leaves out all but the model's tensors, and where these are all, adapters are merged into them; `step` is
    the number of optimizer steps made, where the source does not say; `config` is put beside the weights of a Hugging
    Face folder; `cut` writes a DeepSpeed folder as files of its ranks, and without it as a universal checkpoint.
    `announce` hears the host peak in bytes before anything is written.
    """
    target = Path(target)
    _check_target(target, to, config)
    kind = KINDS[to] if cut is None else _cut_kind(KINDS[to], to, cut)
    contents = open_contents(source)
    if not contents.forms:
        raise InputError(
            f"{source} holds no tensor of a model or optimizer",
            code="checkpoint.no-tensors",
            fix="name another checkpoint",
        )
    steps_made = contents.step if step is None else step
    if contents.kind == "dcp":
        contents = find_ties(contents)
    if to in {"hf", "mlx"} or (weights and to != "peft"):
        contents = merged(contents)
    if weights:
        contents = contents.only_weights()
    if step is not None:
        contents = dataclasses.replace(contents, step=step)
    if to == "shardwise":
        contents = dataclasses.replace(contents, facts={**contents.facts, "step": contents.step})
        _check_named_step(target, contents.step)
    peak = (
        deepspeed_ranks.host_peak_bytes(contents, cut.stage, cut.num_ranks) if cut else kind.host_peak_bytes(contents)
    )
    announce(peak)
    left_out = [*contents.left_out, *_publish(contents, target, kind, config)]
    if to == "hf" and config is None:
        left_out.append("config.json: a checkpoint does not know it, give it with --config")
    written = kind.holds(contents).forms
    return ConvertReport(
        source_kind=contents.kind,
        target_kind=to,
        path=target,
        step=steps_made,
        num_tensors=len(written),
        num_bytes=sum(map(bytes_of, written.values())),
        tied=contents.tied,
        left_out=tuple(left_out),
        moved=convert_mlx.moved(written) if (contents.kind == "mlx") != (to == "mlx") else (),
    )


def _check_target(target: Path, to: str, config: Path | None) -> None:
    if to not in KINDS:
        raise InputError(
            f"there is no kind {to!r} of checkpoint", code="checkpoint.format-unknown", fix=nearest(to, KINDS)
        )
    if target.exists() or target.is_symlink():
        raise InputError(f"target {target} is there already", code="checkpoint.target-exists", fix="name a new one")
    if not target.parent.is_dir():
        raise InputError(
            f"target {target} is in a folder that is not there",
            code="checkpoint.target-folder-missing",
            fix="make the folder first",
        )
    if config is not None and to != "hf":
        raise InputError(
            f"a config goes into a Hugging Face folder, not into {to}",
            code="checkpoint.config-not-applicable",
            fix="leave --config out",
        )
    if config is not None and not config.is_file():
        raise InputError(
            f"config {config} is not a file",
            code="checkpoint.config-not-found",
            fix="name the config.json of the model",
        )


def _check_named_step(target: Path, step: int) -> None:
    named = parse_name(target.name)
    if named is not None and named[0] != step:
        raise InputError(
            f"target {target} is named for another step than {step}",
            code="checkpoint.step-name-mismatch",
            fix="give --step",
        )


def _cut_kind(kind: CheckpointFormat, to: str, cut: TargetRanks) -> CheckpointFormat:
    """Return the kind that writes a DeepSpeed folder for `cut`."""
    if to != "deepspeed":
        raise InputError(
            f"a ZeRO stage and ranks are for a DeepSpeed folder, not for {to}",
            code="checkpoint.zero-not-applicable",
            fix="leave them out",
        )

    def write(contents: Contents, path: Path) -> list[str]:
        return deepspeed_ranks.write_ranks(contents, path, stage=cut.stage, num_ranks=cut.num_ranks)

    return dataclasses.replace(kind, write=write)


def _publish(contents: Contents, target: Path, kind: CheckpointFormat, config: Path | None) -> list[str]:
    """Write under another name and rename: what is at `target` is whole."""
    workshop = target.with_name(f".converting-{target.name}-{secrets.token_hex(4)}")
    try:
        workshop.mkdir()
        draft = workshop / target.name
        left_out = kind.write(contents, draft)
        if config is not None:
            write_synced(draft / "config.json", config.read_bytes())
            sync_folder(draft)
        draft.rename(target)
        sync_folder(target.parent)
    except Exception as error:
        raise explained(error) from error
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return left_out
