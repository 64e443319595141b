"""Adapters in a checkpoint: taken out by themselves, or merged into the weights they stand beside."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.convert.contents import MODEL, Contents
from shardwise.errors import InputError
from shardwise.job.lora import DOWN, UP, adapted_modules, is_adapter

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor


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
            f"the adapters stand beside {lacking[0]}, which is not there",
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
            "the checkpoint tells of no adapters", code="checkpoint.no-adapters", fix="name a run of a job with lora="
        )
    return lora
