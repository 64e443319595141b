"""Every kind of checkpoint that is known: described, converted from any to any other, and compared tensor by tensor."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardwise.checkpoint.convert import deepspeed as convert_deepspeed
from shardwise.checkpoint.convert import deepspeed_universal
from shardwise.checkpoint.convert import deepspeed_write as deepspeed_ranks
from shardwise.checkpoint.convert import hugging_face as convert_hf
from shardwise.checkpoint.convert import mlx as convert_mlx
from shardwise.checkpoint.convert import peft as convert_peft
from shardwise.checkpoint.convert.contents import BATCH_BYTES, Contents, bytes_of, find_ties, read_own, write_own
from shardwise.checkpoint.convert.deepspeed import is_deepspeed
from shardwise.checkpoint.convert.peft import merged, only_adapters
from shardwise.checkpoint.convert.torch_formats import METADATA, read_file, read_folder, write_file, write_folder
from shardwise.checkpoint.disk import sync_folder, write_synced
from shardwise.checkpoint.errors import explained, parse_name
from shardwise.checkpoint.folder import find_checkpoints
from shardwise.checkpoint.spec import ConvertReport, DiffReport, InspectReport, TensorDifference, TensorRow
from shardwise.errors import InputError
from shardwise.runs.console import CHECK_FAILED

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shardwise.checkpoint.spec import ConvertSpec, DiffSpec, InspectSpec, Kind


@dataclass(frozen=True)
class CheckpointFormat:
    """One kind of checkpoint: how to know it, read it and write it."""

    description: str
    is_at: Callable[[Path], bool]
    read: Callable[[Path], Contents]
    write: Callable[[Contents, Path], list[str]]
    """Writes to a path where nothing is, and returns what the target cannot hold, one sentence each."""
    max_bytes_in_memory: int | None
    """Bytes of tensors that writing holds at a time, one tensor at least; None for all of them."""
    holds: Callable[[Contents], Contents] = lambda contents: contents
    """Returns what of all contents this kind can hold."""

    def host_peak_bytes(self, contents: Contents) -> int:
        """Return how many bytes of tensors are on the host at once while `contents` are written, about."""
        sizes = [bytes_of(form) for form in self.holds(contents).forms.values()]
        if self.max_bytes_in_memory is None:
            return sum(sizes)
        return max(min(sum(sizes), self.max_bytes_in_memory), max(sizes, default=0))


KINDS = {
    "shardwise": CheckpointFormat(
        "a checkpoint of ours, a folder of them or a run directory",
        lambda path: bool(find_checkpoints(path)),
        read_own,
        write_own,
        max_bytes_in_memory=BATCH_BYTES,
    ),
    "dcp": CheckpointFormat(
        "a torch.distributed.checkpoint folder",
        lambda path: (path / METADATA).is_file(),
        read_folder,
        write_folder,
        max_bytes_in_memory=None,
    ),
    "deepspeed": CheckpointFormat(
        "a DeepSpeed folder",
        is_deepspeed,
        convert_deepspeed.read,
        deepspeed_universal.write,
        max_bytes_in_memory=BATCH_BYTES,
    ),
    "peft": CheckpointFormat(
        "a folder of adapters as peft has it",
        convert_peft.is_peft,
        convert_peft.read,
        convert_peft.write,
        max_bytes_in_memory=None,
        holds=only_adapters,
    ),
    "mlx": CheckpointFormat(
        "a file of MLX weights",
        convert_mlx.is_mlx,
        convert_mlx.read,
        convert_mlx.write,
        max_bytes_in_memory=None,
        holds=convert_mlx.holds,
    ),
    "hf": CheckpointFormat(
        "a Hugging Face folder of safetensors",
        lambda path: path.suffix == ".safetensors" or any(path.glob("*.safetensors")),
        convert_hf.read,
        convert_hf.write,
        max_bytes_in_memory=convert_hf.MAX_FILE_BYTES,
        holds=Contents.only_weights,
    ),
    "torch": CheckpointFormat("a torch file", Path.is_file, read_file, write_file, max_bytes_in_memory=None),
}
"""Tried in this order."""


def open_contents(path: Path | str) -> Contents:
    """Return what the checkpoint at `path` holds, whatever its kind; no code in it is run."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist", code="checkpoint.not-found", fix="name a checkpoint")
    for kind in KINDS.values():
        if kind.is_at(path):
            return kind.read(path)
    raise InputError(
        f"{path} is not a checkpoint of a known kind",
        code="checkpoint.format-unrecognized",
        fix=f"name {', '.join(kind.description for kind in KINDS.values())}",
    )


def inspect(spec: InspectSpec) -> InspectReport:
    """Return the facts and tensors of a checkpoint of any kind."""
    contents = open_contents(spec.path)
    tensors = []
    for name, form in contents.forms.items():
        tensors.append(TensorRow(name=name, dtype=form[0], shape=form[1], num_bytes=bytes_of(form)))
    return InspectReport(
        path=spec.path,
        kind=contents.kind,
        step=contents.step,
        tensors=tuple(tensors),
        facts=contents.facts,
        not_understood=contents.left_out,
        lists_tensors=spec.tensors,
    )


def convert(spec: ConvertSpec, *, announce: Callable[[int], None] = lambda _: None) -> ConvertReport:
    """Write a checkpoint as a new one of another kind, whole or not at all; one process.

    With `weights`, and where the target holds the model's tensors alone, adapters are merged into them. `announce`
    receives the host peak in bytes before anything is written.
    """
    _check_target(spec.target, spec.to, spec.config)
    kind = _ranks_kind(spec)
    contents = open_contents(spec.source)
    if not contents.forms:
        raise InputError(
            f"{spec.source} holds no tensor of a model or optimizer",
            code="checkpoint.no-tensors",
            fix="name another checkpoint",
        )
    steps_made = contents.step if spec.step is None else spec.step
    contents = _selected(contents, spec)
    if spec.zero is not None and spec.nproc is not None:
        announce(deepspeed_ranks.host_peak_bytes(contents, spec.zero, spec.nproc))
    else:
        announce(kind.host_peak_bytes(contents))
    left_out = [*contents.left_out, *_publish(contents, spec.target, kind, spec.config)]
    if spec.to == "hf" and spec.config is None:
        left_out.append("config.json: a checkpoint does not hold it, give it with --config")
    written = kind.holds(contents).forms
    return ConvertReport(
        source_kind=contents.kind,
        target_kind=spec.to,
        path=spec.target,
        step=steps_made,
        num_tensors=len(written),
        num_bytes=sum(map(bytes_of, written.values())),
        tied=contents.tied,
        left_out=tuple(left_out),
        moved=convert_mlx.moved(written) if (contents.kind == "mlx") != (spec.to == "mlx") else (),
    )


def _selected(contents: Contents, spec: ConvertSpec) -> Contents:
    """Return what of the source is to be written, in the form that the target needs."""
    if contents.kind == "dcp":
        contents = find_ties(contents)
    if spec.to in {"hf", "mlx"} or (spec.weights and spec.to != "peft"):
        contents = merged(contents)
    if spec.weights:
        contents = contents.only_weights()
    if spec.step is not None:
        contents = dataclasses.replace(contents, step=spec.step)
    if spec.to == "shardwise":
        contents = dataclasses.replace(contents, facts={**contents.facts, "step": contents.step})
        _check_named_step(spec.target, contents.step)
    return contents


def _check_target(target: Path, to: Kind, config: Path | None) -> None:
    if target.exists() or target.is_symlink():
        raise InputError(f"target {target} exists already", code="checkpoint.target-exists", fix="name a new one")
    if not target.parent.is_dir():
        raise InputError(
            f"target {target} is in a folder that does not exist",
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


def _ranks_kind(spec: ConvertSpec) -> CheckpointFormat:
    """Return the kind to write; a DeepSpeed folder with a ZeRO stage is written as the files of its ranks."""
    stage, num_ranks = spec.zero, spec.nproc
    if stage is None or num_ranks is None:
        return KINDS[spec.to]
    if spec.to != "deepspeed":
        raise InputError(
            f"a ZeRO stage and ranks are for a DeepSpeed folder, not for {spec.to}",
            code="checkpoint.zero-not-applicable",
            fix="leave them out",
        )

    def write(contents: Contents, path: Path) -> list[str]:
        return deepspeed_ranks.write_ranks(contents, path, stage=stage, num_ranks=num_ranks)

    return dataclasses.replace(KINDS[spec.to], write=write)


def _publish(contents: Contents, target: Path, kind: CheckpointFormat, config: Path | None) -> list[str]:
    """Write under another name and rename: what is at `target` is whole."""
    temporary = target.with_name(f".converting-{target.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        draft = temporary / target.name
        left_out = kind.write(contents, draft)
        if config is not None:
            write_synced(draft / "config.json", config.read_bytes())
            sync_folder(draft)
        draft.rename(target)
        sync_folder(target.parent)
    except Exception as error:
        raise explained(error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return left_out


# The difference of two checkpoints of any kind: which tensors, by how much, and which facts.


def diff(spec: DiffSpec) -> DiffReport:
    """Compare two checkpoints of any kinds; holds a few hundred megabytes of each at a time."""
    left, right = open_contents(spec.left), open_contents(spec.right)
    shared = [name for name in left.forms if name in right.forms]
    alike = [name for name in shared if left.forms[name] == right.forms[name]]
    values = []
    for names in left.split(alike, BATCH_BYTES):
        ours, theirs = left.read(names), right.read(names)
        for name in names:
            found = _compare(name, ours[name], theirs[name])
            if found is not None:
                values.append(found)
    other_form = []
    for name in shared:
        one, other = left.forms[name], right.forms[name]
        if one != other:
            other_form.append(f"{name}: {_form_text(one)} and {_form_text(other)}")
    report = DiffReport(
        left=spec.left,
        right=spec.right,
        num_equal=len(alike) - len(values),
        only_left=tuple(name for name in left.forms if name not in right.forms),
        only_right=tuple(name for name in right.forms if name not in left.forms),
        other_form=tuple(other_form),
        values=tuple(values),
        facts=tuple(_differing(flatten(left.facts), flatten(right.facts))),
    )
    return report if report.are_tensors_equal else msgspec.structs.replace(report, exit_code=CHECK_FAILED)


def flatten(facts: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested facts under dotted names."""
    if not isinstance(facts, dict) or not facts:
        return {prefix: facts} if prefix else {}
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        flat |= flatten(value, f"{prefix}.{name}" if prefix else name)
    return flat


def _differing(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    names = dict.fromkeys((*left, *right))
    return [(name, left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)]


def _compare(name: str, left: Tensor, right: Tensor) -> TensorDifference | None:
    if not left.numel():
        return None
    one, other = (
        tensor.contiguous().reshape(-1).view(torch.uint8).view(tensor.numel(), -1) for tensor in (left, right)
    )
    different = (one != other).any(dim=1)
    count = int(different.sum())
    if not count:
        return None
    a, b = (_wide(tensor.contiguous().reshape(-1)[different]) for tensor in (left, right))
    gap = (a - b).abs()
    gap = torch.where(gap.isnan() & a.isnan() & b.isnan(), torch.zeros_like(gap), gap)
    largest = float(gap.max())
    scale = max(float(_wide(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max()) for tensor in (left, right))
    return TensorDifference(name, count, left.numel(), largest, largest / scale if scale else largest)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _form_text(form: tuple[str, tuple[int, ...]]) -> str:
    return f"{form[0]} {list(form[1])}"
