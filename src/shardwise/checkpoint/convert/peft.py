"""A folder of adapters as peft writes and reads it: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from shardwise.checkpoint.convert import hugging_face as convert_hf
from shardwise.checkpoint.convert.contents import MODEL, Contents
from shardwise.checkpoint.disk import sync_file, sync_folder, write_synced
from shardwise.errors import InputError
from shardwise.job.lora import CONFIG, PREFIX, WEIGHTS, adapted_modules, config_json, is_adapter, read_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path
    from typing import Any

    from torch import Tensor


def is_peft(path: Path) -> bool:
    """Whether a folder holds adapters."""
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


def read(path: Path) -> Contents:
    """Return the adapters of a folder under the names of the model; they are read when they are asked for."""
    lora = read_config(path)
    contents = convert_hf.read(path / WEIGHTS)
    forms = {MODEL + name.removeprefix(MODEL).removeprefix(PREFIX): form for name, form in contents.forms.items()}

    def get(names: Collection[str]) -> dict[str, Tensor]:
        values = contents.read([MODEL + PREFIX + name.removeprefix(MODEL) for name in names])
        return {MODEL + name.removeprefix(MODEL + PREFIX): value for name, value in values.items()}

    modules = adapted_modules(name.removeprefix(MODEL) for name in forms)
    lora["transposed"] = modules if lora.pop("transposed") else []
    return dataclasses.replace(contents, kind="peft", forms=forms, facts={"lora": lora}, read=get)


def write(contents: Contents, path: Path) -> list[str]:
    """Write a new folder with the adapters of `contents` and return what it cannot hold."""
    names = [name for name in contents.forms if name.startswith(MODEL) and is_adapter(name)]
    if contents.lora is None or not names:
        raise InputError(
            "the checkpoint holds no adapters", code="checkpoint.no-adapters", fix="name a run of a job with lora="
        )
    frozen = [name.removeprefix(MODEL) for name in contents.forms if name.startswith(MODEL) and not is_adapter(name)]
    values = {name.removeprefix(MODEL): value for name, value in contents.read(names).items()}
    write_adapters(path, values, [*frozen, *contents.tied], contents.lora)
    others = len(contents.forms) - len(names)
    return [f"{others} other tensors: the folder holds adapters only"] if others else []


def write_adapters(path: Path, values: Mapping[str, Tensor], frozen: Collection[str], lora: dict[str, Any]) -> None:
    """Write adapters by the names of the model; `frozen` names its other weights, `lora` is as in Lora.facts."""
    modules = adapted_modules(values)
    path.mkdir()
    tensors = {PREFIX + name: value.contiguous().clone() for name, value in values.items()}
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    sync_file(path / WEIGHTS)
    write_synced(path / CONFIG, config_json(lora, modules, frozen))
    sync_folder(path)
