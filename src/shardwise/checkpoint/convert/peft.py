"""LoRA adapters: taken out of a checkpoint, merged into its weights, and as a folder that peft writes and reads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from shardwise.checkpoint.convert import hugging_face as convert_hf
from shardwise.checkpoint.convert.contents import MODEL, Contents
from shardwise.checkpoint.disk import sync_file, sync_folder, write_synced
from shardwise.errors import InputError
from shardwise.job.lora import CONFIG, DOWN, PREFIX, UP, WEIGHTS, adapted_modules, config_json, is_adapter, read_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from torch import Tensor


# Adapters in a checkpoint: taken out by themselves, or merged into the weights they adapt.


def only_adapters(contents: Contents) -> Contents:
    """Return the same with nothing but adapters; a checkpoint that has none is refused."""
    _facts(contents)
    forms = {name: form for name, form in contents.forms.items() if name.startswith(MODEL) and is_adapter(name)}
    return dataclasses.replace(contents, forms=forms)


def merged(contents: Contents) -> Contents:
    """Return the same with what adapters add to a matrix added to it; unchanged where there are none."""
    modules = adapted_modules(name.removeprefix(MODEL) for name in contents.forms if name.startswith(MODEL))
    if not modules:
        return contents
    lora = _facts(contents)
    sums = {f"{MODEL}{name}.weight" for name in modules}
    lacking = sorted(sums - contents.forms.keys())
    if lacking:
        raise InputError(
            f"the adapters adapt {lacking[0]}, which does not exist",
            code="checkpoint.adapter-base-missing",
            fix="name the run they are of",
        )

    def read(names: Collection[str]) -> dict[str, Tensor]:
        summed = [name for name in names if name in sums]
        factors = [factor for name in summed for factor in _factors(name)]
        here = contents.read({*names, *factors})
        return {name: _sum(here[name], name, here, lora) if name in sums else here[name] for name in names}

    facts = {key: fact for key, fact in contents.facts.items() if key != "lora"}
    return dataclasses.replace(
        contents,
        forms={name: form for name, form in contents.forms.items() if not is_adapter(name)},
        facts={**facts, "tied": {alias: name for alias, name in contents.tied.items() if not is_adapter(alias)}},
        read=read,
        left_out=(*contents.left_out, f"adapters: merged into {len(modules)} weights"),
    )


def merge_state(state: dict[str, Tensor], lora: dict[str, Any]) -> dict[str, Tensor]:
    """Return a whole state dict without adapters, with what they add to a weight added to it."""
    plain = {name: value for name, value in state.items() if not is_adapter(name)}
    for module in adapted_modules(state):
        name = f"{module}.weight"
        plain[name] = _sum(plain[name], name, state, lora)
    return plain


def _sum(weight: Tensor, name: str, values: Mapping[str, Tensor], lora: dict[str, Any]) -> Tensor:
    """Return a weight with scale * B @ A added, in its own dtype; `lora` are the facts of a checkpoint."""
    down, up = (values[factor] for factor in _factors(name))
    product = (up @ down) * (lora["alpha"] / lora["rank"])
    if name.removeprefix(MODEL).removesuffix(".weight") in lora.get("transposed", ()):
        product = product.T
    whole: Tensor = (weight.to(product.dtype) + product).to(weight.dtype)
    return whole


def _factors(name: str) -> tuple[str, str]:
    module = name.removesuffix(".weight")
    return f"{module}.{DOWN}.weight", f"{module}.{UP}.weight"


def _facts(contents: Contents) -> dict[str, Any]:
    lora = contents.lora
    if lora is None:
        raise InputError(
            "the checkpoint has no adapters", code="checkpoint.no-adapters", fix="name a run of a job with lora="
        )
    return lora


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
