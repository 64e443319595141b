"""Reads and writes Hugging Face directories (safetensors files) and PEFT directories (LoRA adapters)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shardwise.checkpoint.convert.contents import MODEL, Contents, bytes_of, form_from, short_names
from shardwise.checkpoint.disk import DamagedError, sync_directory, sync_file, write_synced
from shardwise.checkpoint.manifest import DTYPES
from shardwise.errors import InputError
from shardwise.job.lora import CONFIG, DOWN, PREFIX, UP, WEIGHTS, adapted_modules, config_json, is_adapter, read_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from shardwise.checkpoint.manifest import Form

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000
"""Maximum size of one weight file in bytes, which is also the peak host memory of a conversion."""


def read(path: Path) -> Contents:
    """Return the weights of a directory or of one safetensors file; tensors are read lazily."""
    files: dict[str, Any] = {}
    forms: dict[str, Form] = {}
    for file, expected in _files(path).items():
        opened = _open(file)
        names = opened.offset_keys()  # in file order, which is the order in which the tensors were saved
        if expected:
            missing = expected.difference(names)
            if missing:
                raise DamagedError(
                    f"{file} does not contain the tensor {min(missing)!r}, which the index lists",
                    code="checkpoint.tensor-missing",
                )
            names = [name for name in names if name in expected]
        for name in names:
            if MODEL + name in files:
                raise InputError(
                    f"two files in {path} contain the tensor {name!r}",
                    code="checkpoint.tensor-repeated",
                    fix="remove the file that is not part of the model",
                )
            part = opened.get_slice(name)
            code = part.get_dtype()
            if code not in DTYPES:
                raise InputError(
                    f"tensor {name!r} has the unsupported dtype {code}",
                    code="checkpoint.dtype-unsupported",
                    fix=f"use one of {', '.join(DTYPES)}",
                )
            files[MODEL + name] = opened
            forms[MODEL + name] = form_from(name, DTYPES[code], tuple(part.get_shape()))

    def read_stored(names: Collection[str]) -> dict[str, Tensor]:
        return {name: files[name].get_tensor(name.removeprefix(MODEL)) for name in names}

    return Contents(kind="hf", step=0, forms=forms, facts={}, read=read_stored)


def write(contents: Contents, path: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> list[str]:
    """Write a new directory and return the contents that it cannot represent; one file is in memory at a time."""
    parts = contents.split(contents.weights, max_file_bytes) or [[]]
    path.mkdir()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        file = SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {}
        for name, tensor in short_names(contents.read(names)).items():
            tensors[name] = tensor.contiguous().clone()
            weight_map[name] = file
        save_file(tensors, path / file, metadata={"format": "pt"})
        sync_file(path / file)
    if len(parts) > 1:
        total = sum(bytes_of(contents.forms[name]) for name in contents.weights)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_synced(path / INDEX, msgspec.json.format(msgspec.json.encode(index), indent=2))
    sync_directory(path)
    return left_out(contents, "directory")


def left_out(contents: Contents, target: str) -> list[str]:
    """Return the contents that a file or directory (`target`) of weights cannot represent, one sentence each."""
    left_out = [f"{alias}: stored once, tied to {name}" for alias, name in contents.tied.items()]
    others = Counter(name.partition("/")[0] for name in contents.forms if not name.startswith(MODEL))
    for part, count in others.items():
        left_out.append(f"{part}: {count} tensors, the {target} contains weights only")
    facts = [name for name in contents.facts if name != "tied"]
    if facts:
        left_out.append(f"facts ({', '.join(facts)}): the {target} contains weights only")
    return left_out


def _files(path: Path) -> dict[Path, set[str]]:
    """Return the files of a directory and the tensors that the index lists for each; an empty set means all."""
    if path.is_file():
        return {path: set()}
    index, single = path / INDEX, path / SINGLE
    files: dict[Path, set[str]] = {}
    if not index.exists():
        for file in [single] if single.exists() else sorted(path.glob("*.safetensors")):
            files[file] = set()
        return files
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, OSError) as error:
        raise DamagedError(f"{index} is not a valid index ({error})", code="checkpoint.index-invalid") from None
    for name, file_name in weight_map.items():
        if Path(file_name).name != file_name:
            raise InputError(
                f"{index} refers to {file_name!r} outside the directory",
                code="checkpoint.path-escapes",
                fix="do not use this directory",
            )
        files.setdefault(path / file_name, set()).add(name)
    return files


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{file} cannot be read ({error})", code="checkpoint.read-failed") from None


def only_adapters(contents: Contents) -> Contents:
    """Return contents with the LoRA adapters only; raise an InputError if there are none."""
    adapters = list(filter(is_adapter, contents.weights))
    _lora(contents if adapters else dataclasses.replace(contents, facts={}))
    return contents.select(adapters)


def merge_adapters(contents: Contents) -> Contents:
    """Return contents in which the LoRA adapters are merged into the weights; unchanged if there are none."""
    modules = adapted_modules(contents.weights)
    if not modules:
        return contents
    lora = _lora(contents)
    adapted = {f"{module}.weight" for module in modules}
    missing = adapted - contents.forms.keys()
    if missing:
        raise InputError(
            f"the checkpoint contains adapters of {min(missing)}, but not the weight itself",
            code="checkpoint.adapter-base-missing",
            fix="pass the run directory that contains the base weights",
        )

    def read(names: Collection[str]) -> dict[str, Tensor]:
        required = set(names)
        for name in adapted.intersection(names):
            required.update(_factors(name))
        values = contents.read(required)
        result = {}
        for name in names:
            result[name] = _merge(name, values, lora) if name in adapted else values[name]
        return result

    merged = contents.select([name for name in contents.forms if not is_adapter(name)])
    tied = {alias: name for alias, name in contents.tied.items() if not is_adapter(alias)}
    facts = {**contents.facts, "tied": tied}
    facts.pop("lora", None)
    left_out = (*contents.left_out, f"adapters: merged into {len(modules)} weights")
    return dataclasses.replace(merged, facts=facts, read=read, left_out=left_out)


def merge_state(state: dict[str, Tensor], lora: dict[str, Any]) -> dict[str, Tensor]:
    """Return an unsharded state dict in which the LoRA adapters are merged into the weights."""
    merged = {name: value for name, value in state.items() if not is_adapter(name)}
    for module in adapted_modules(state):
        name = f"{module}.weight"
        merged[name] = _merge(name, state, lora)
    return merged


def _merge(name: str, values: Mapping[str, Tensor], lora: dict[str, Any]) -> Tensor:
    """Return the weight W + (alpha / rank) * B @ A in the dtype of W."""
    down, up = _factors(name)
    product = (values[up] @ values[down]) * (lora["alpha"] / lora["rank"])
    if name.removeprefix(MODEL).removesuffix(".weight") in lora.get("transposed", ()):
        product = product.T
    weight = values[name]
    merged: Tensor = (weight.to(product.dtype) + product).to(weight.dtype)
    return merged


def _factors(name: str) -> tuple[str, str]:
    module = name.removesuffix(".weight")
    return f"{module}.{DOWN}.weight", f"{module}.{UP}.weight"


def _lora(contents: Contents) -> dict[str, Any]:
    lora = contents.lora
    if lora is None:
        raise InputError(
            "the checkpoint contains no adapters",
            code="checkpoint.no-adapters",
            fix="pass the adapter/ folder of a finished run with Job.lora, or a run directory with checkpoints",
        )
    return lora


def is_peft(path: Path) -> bool:
    """Return whether a directory contains LoRA adapters in the format of PEFT."""
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


def read_peft(path: Path) -> Contents:
    """Return the adapters of a PEFT directory under the parameter names of the model; tensors are read lazily."""
    lora = read_config(path)
    contents = read(path / WEIGHTS)
    stored = {MODEL + name.removeprefix(MODEL + PREFIX): name for name in contents.forms}

    def read_stored(names: Collection[str]) -> dict[str, Tensor]:
        values = contents.read([stored[name] for name in names])
        return {name: values[stored[name]] for name in names}

    forms = {name: contents.forms[stored_name] for name, stored_name in stored.items()}
    modules = adapted_modules(short_names(forms))
    lora["transposed"] = modules if lora.pop("transposed") else []
    return dataclasses.replace(contents, kind="peft", forms=forms, facts={"lora": lora}, read=read_stored)


def write_peft(contents: Contents, path: Path) -> list[str]:
    """Write the adapters of `contents` to a new directory and return the contents that it cannot represent."""
    adapters = only_adapters(contents)
    frozen = [name.removeprefix(MODEL) for name in contents.weights if name not in adapters.forms]
    values = short_names(contents.read(adapters.forms))
    write_adapters(path, values, [*frozen, *contents.tied], _lora(contents))
    num_others = len(contents.forms) - len(adapters.forms)
    return [f"{num_others} other tensors: the directory contains adapters only"] if num_others else []


def write_adapters(path: Path, values: Mapping[str, Tensor], frozen: Collection[str], lora: dict[str, Any]) -> None:
    """Write LoRA adapters, given by parameter name, as a PEFT directory.

    `frozen` are the names of the other weights of the model, and `lora` is the result of Lora.facts.
    """
    path.mkdir()
    tensors = {PREFIX + name: value.contiguous().clone() for name, value in values.items()}
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    sync_file(path / WEIGHTS)
    write_synced(path / CONFIG, config_json(lora, adapted_modules(values), frozen))
    sync_directory(path)
