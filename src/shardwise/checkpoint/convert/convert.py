"""Inspection, conversion and comparison of checkpoints in all supported formats."""

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
from shardwise.checkpoint.convert.contents import (
    BATCH_BYTES,
    Contents,
    bytes_of,
    find_ties,
    read_shardwise,
    write_shardwise,
)
from shardwise.checkpoint.convert.deepspeed import is_deepspeed
from shardwise.checkpoint.convert.hugging_face import merge_adapters, only_adapters
from shardwise.checkpoint.convert.torch_formats import METADATA, read_directory, read_file, write_directory, write_file
from shardwise.checkpoint.directory import find_checkpoints
from shardwise.checkpoint.disk import as_shardwise_error, sync_directory, write_synced
from shardwise.checkpoint.names import parse_name
from shardwise.checkpoint.spec import ConvertReport, DiffReport, InspectReport, TensorDifference, TensorRow
from shardwise.errors import InputError
from shardwise.runs.console import CHECK_FAILED
from shardwise.runs.directory import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shardwise.checkpoint.spec import ConvertSpec, DiffSpec, InspectSpec, Kind


@dataclass(frozen=True)
class CheckpointFormat:
    """A checkpoint format: how to recognize, read and write it."""

    description: str
    is_at: Callable[[Path], bool]
    read: Callable[[Path], Contents]
    write: Callable[[Contents, Path], list[str]]
    """Writes to a new path and returns the contents that the format cannot represent, one sentence each."""
    max_bytes_in_memory: int | None
    """Maximum number of bytes of tensors in memory while writing, unless one tensor is larger; None if unlimited."""
    supported: Callable[[Contents], Contents] = lambda contents: contents
    """Returns the contents that the format can represent."""

    def host_peak_bytes(self, contents: Contents) -> int:
        """Estimate the peak host memory for tensors in bytes while `contents` are written."""
        sizes = list(map(bytes_of, self.supported(contents).forms.values()))
        if self.max_bytes_in_memory is None:
            return sum(sizes)
        return max(min(sum(sizes), self.max_bytes_in_memory), max(sizes, default=0))


def _read_deepspeed(path: Path) -> Contents:
    if convert_deepspeed.is_universal(path):
        return deepspeed_universal.read(path)
    return convert_deepspeed.read(path)


CONFIG = "config.json"
KINDS = {
    "shardwise": CheckpointFormat(
        "a shardwise checkpoint, a directory of checkpoints, a run directory",
        lambda path: bool(find_checkpoints(path)),
        read_shardwise,
        write_shardwise,
        max_bytes_in_memory=BATCH_BYTES,
    ),
    "dcp": CheckpointFormat(
        "a torch.distributed.checkpoint directory",
        lambda path: (path / METADATA).is_file(),
        read_directory,
        write_directory,
        max_bytes_in_memory=None,
    ),
    "deepspeed": CheckpointFormat(
        "a DeepSpeed directory", is_deepspeed, _read_deepspeed, deepspeed_universal.write, BATCH_BYTES
    ),
    "peft": CheckpointFormat(
        "a PEFT adapter directory",
        convert_hf.is_peft,
        convert_hf.read_peft,
        convert_hf.write_peft,
        max_bytes_in_memory=None,
        supported=only_adapters,
    ),
    "mlx": CheckpointFormat(
        "an MLX weight file",
        convert_mlx.is_mlx,
        convert_mlx.read,
        convert_mlx.write,
        max_bytes_in_memory=None,
        supported=convert_mlx.supported,
    ),
    "hf": CheckpointFormat(
        "a Hugging Face directory of safetensors",
        lambda path: path.suffix == ".safetensors" or any(path.glob("*.safetensors")),
        convert_hf.read,
        convert_hf.write,
        max_bytes_in_memory=convert_hf.MAX_FILE_BYTES,
        supported=Contents.only_weights,
    ),
    "torch": CheckpointFormat("a torch.save file", Path.is_file, read_file, write_file, max_bytes_in_memory=None),
}
"""The supported formats, in the order in which `open_contents` tries them."""


def open_contents(path: Path | str) -> Contents:
    """Return the contents of a checkpoint of any supported format, without executing code from it."""
    path = Path(path)
    if not path.exists():
        raise InputError(
            f"{path} does not exist", code="checkpoint.not-found", fix="pass the path of an existing checkpoint"
        )
    for kind in KINDS.values():
        if kind.is_at(path):
            contents = kind.read(path)
            last = _last_step(path)
            if last <= contents.step:
                return contents
            reason = f"steps {contents.step + 1} to {last}: {RunDirectory(path).weights} has the final weights"
            return dataclasses.replace(contents, left_out=(*contents.left_out, reason))
    run = RunDirectory(path)
    if run.weights.is_file():
        contents = read_file(run.weights)
        reason = f"checkpoints: {path} has none, so {run.weights} was read; train with --save-every N to save them"
        step = max(contents.step, _last_step(path))
        return dataclasses.replace(contents, step=step, left_out=(*contents.left_out, reason))
    if run.job.is_file():
        raise InputError(
            f"run directory {path} has no checkpoint, and no weights.pt, which a run writes at its end",
            code="checkpoint.run-without-checkpoint",
            fix="pass --save-every N to shardwise train",
        )
    raise InputError(
        f"{path} is not a checkpoint of a supported format",
        code="checkpoint.format-unrecognized",
        fix=f"pass one of: {', '.join(kind.description for kind in KINDS.values())}",
    )


def _last_step(path: Path) -> int:
    """Return the last step of a finished run with final weights; 0 for anything else."""
    run = RunDirectory(path)
    if not run.weights.is_file() or not run.report_json.is_file():
        return 0
    return int(msgspec.json.decode(run.report_json.read_bytes())["result"]["steps"])


def inspect(spec: InspectSpec) -> InspectReport:
    """Return the facts and tensors of a checkpoint of any supported format."""
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
    """Convert a checkpoint to a different format in one process; the target is published atomically.

    If the target contains only weights, LoRA adapters are merged into them. `announce` receives the estimated peak
    host memory in bytes before anything is written.
    """
    _check_target(spec.target, spec.to, spec.config)
    kind = _ranks_kind(spec)
    contents = open_contents(spec.source)
    if not contents.forms:
        raise InputError(
            f"{spec.source} contains no tensor of a model or optimizer",
            code="checkpoint.no-tensors",
            fix="pass a different checkpoint",
        )
    num_steps = contents.step if spec.step is None else spec.step
    contents = _select(contents, spec)
    if spec.zero is not None and spec.nproc is not None:
        announce(deepspeed_ranks.host_peak_bytes(contents, spec.zero, spec.nproc))
    else:
        announce(kind.host_peak_bytes(contents))
    config = _config_files(spec) if spec.to == "hf" else {}
    left_out = [*contents.left_out, *_publish(contents, spec.target, kind, config)]
    if spec.to == "hf" and not config:
        left_out.append("config.json: not part of this checkpoint; pass --config FILE or FOLDER to copy it")
    written = kind.supported(contents).forms
    moved: tuple[str, ...] = ()
    if (contents.kind == "mlx") != (spec.to == "mlx"):
        moved = convert_mlx.permuted_weights(written)
    return ConvertReport(
        source_kind=contents.kind,
        target_kind=spec.to,
        path=spec.target,
        step=num_steps,
        num_tensors=len(written),
        num_bytes=sum(map(bytes_of, written.values())),
        tied=contents.tied,
        left_out=tuple(left_out),
        moved=moved,
    )


def _select(contents: Contents, spec: ConvertSpec) -> Contents:
    """Return the contents to write: with ties detected, adapters merged and the step set as the target requires."""
    if contents.kind == "dcp":
        contents = find_ties(contents)
    if spec.to in {"hf", "mlx"} or (spec.weights and spec.to != "peft"):
        contents = merge_adapters(contents)
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
        raise InputError(f"target {target} already exists", code="checkpoint.target-exists", fix="pass a new path")
    if not target.parent.is_dir():
        raise InputError(
            f"the directory {target.parent} of the target does not exist",
            code="checkpoint.target-folder-missing",
            fix="create the directory first",
        )
    if config is not None and to != "hf":
        raise InputError(
            f"--config is valid for --to hf only, got --to {to}",
            code="checkpoint.config-not-applicable",
            fix="remove --config",
        )
    if config is not None and not config.is_file() and not (config / CONFIG).is_file():
        raise InputError(
            f"--config {config} is not a file, nor a folder with {CONFIG}",
            code="checkpoint.config-not-found",
            fix="pass the config.json of the model",
        )


def _config_files(spec: ConvertSpec) -> dict[str, Path]:
    """Return the config files for a Hugging Face directory: from --config, or from the run that contains the source."""
    if spec.config is not None and spec.config.is_file():
        return {CONFIG: spec.config}
    runs = [RunDirectory(path) for path in (spec.source, *spec.source.parents[:2])]
    for folder in [spec.config] if spec.config else [run.model for run in runs if run.weights.is_file()]:
        if (folder / CONFIG).is_file():
            return {file.name: file for file in folder.glob("*config.json")}
    return {}


def _check_named_step(target: Path, step: int) -> None:
    named = parse_name(target.name)
    if named is not None and named[0] != step:
        raise InputError(
            f"target {target} is named for step {named[0]}, but the checkpoint is at step {step}",
            code="checkpoint.step-name-mismatch",
            fix="rename the target, or pass --step",
        )


def _ranks_kind(spec: ConvertSpec) -> CheckpointFormat:
    """Return the target format; with a ZeRO stage, the DeepSpeed format writes one file per rank."""
    stage, num_ranks = spec.zero, spec.nproc
    if stage is None or num_ranks is None:
        return KINDS[spec.to]
    if spec.to != "deepspeed":
        raise InputError(
            f"--zero and --nproc are valid for --to deepspeed only, got --to {spec.to}",
            code="checkpoint.zero-not-applicable",
            fix="remove both options",
        )

    def write(contents: Contents, path: Path) -> list[str]:
        return deepspeed_ranks.write_ranks(contents, path, stage=stage, num_ranks=num_ranks)

    return dataclasses.replace(KINDS[spec.to], write=write)


def _publish(contents: Contents, target: Path, kind: CheckpointFormat, config: dict[str, Path]) -> list[str]:
    """Write to a temporary directory and rename it, so that `target` is always complete."""
    temporary = target.with_name(f".converting-{target.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        unpublished = temporary / target.name
        left_out = kind.write(contents, unpublished)
        for name, file in config.items():
            write_synced(unpublished / name, file.read_bytes())
        if config:
            sync_directory(unpublished)
        unpublished.rename(target)
        sync_directory(target.parent)
    except Exception as error:
        raise as_shardwise_error(error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return left_out


def diff(spec: DiffSpec) -> DiffReport:
    """Compare two checkpoints of any supported formats, reading BATCH_BYTES of each at a time."""
    left, right = open_contents(spec.left), open_contents(spec.right)
    comparable, other_form = [], []
    for name, form in left.forms.items():
        other = right.forms.get(name)
        if form == other:
            comparable.append(name)
        elif other is not None:
            other_form.append(f"{name}: {_form_text(form)} and {_form_text(other)}")
    values = []
    for names in left.split(comparable, BATCH_BYTES):
        left_values, right_values = left.read(names), right.read(names)
        for name in names:
            found = _compare(name, left_values[name], right_values[name])
            if found is not None:
                values.append(found)
    report = DiffReport(
        left=spec.left,
        right=spec.right,
        num_equal=len(comparable) - len(values),
        only_left=tuple(name for name in left.forms if name not in right.forms),
        only_right=tuple(name for name in right.forms if name not in left.forms),
        other_form=tuple(other_form),
        values=tuple(values),
        facts=tuple(_differing(flatten(left.facts), flatten(right.facts))),
    )
    if not report.are_tensors_equal:
        report = msgspec.structs.replace(report, exit_code=CHECK_FAILED)
    return report


def flatten(facts: dict[str, Any]) -> dict[str, Any]:
    """Return nested facts as one level of dotted names."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            for inner, inner_value in flatten(value).items():
                flat[f"{name}.{inner}"] = inner_value
        else:
            flat[name] = value
    return flat


def _differing(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    names = dict.fromkeys((*left, *right))
    return [(name, left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)]


def _compare(name: str, left: Tensor, right: Tensor) -> TensorDifference | None:
    if not left.numel():
        return None
    different = (_element_bytes(left) != _element_bytes(right)).any(dim=1)
    count = int(different.sum())
    if not count:
        return None
    a, b = _double(left.reshape(-1)[different]), _double(right.reshape(-1)[different])
    difference = (a - b).abs()
    difference[a.isnan() & b.isnan()] = 0.0  # NaNs with different bits
    largest = float(difference.max())
    scale = max(_largest_magnitude(left), _largest_magnitude(right)) or 1.0
    return TensorDifference(name, count, left.numel(), largest, largest / scale)


def _element_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).view(tensor.numel(), -1)


def _largest_magnitude(tensor: Tensor) -> float:
    return float(_double(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max())


def _double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _form_text(form: tuple[str, tuple[int, ...]]) -> str:
    return f"{form[0]} {list(form[1])}"
