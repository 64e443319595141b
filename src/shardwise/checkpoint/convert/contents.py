"""Contents of a checkpoint of any kind under our own names, the middle of every conversion; and our own checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.errors import name_of
from shardwise.checkpoint.folder import CheckpointFolder, find_checkpoints
from shardwise.checkpoint.manifest import CODES, DTYPES, read_manifest
from shardwise.checkpoint.read import Filling
from shardwise.checkpoint.shard import ShardLayout
from shardwise.checkpoint.write import Draft
from shardwise.errors import InputError
from shardwise.job.lora import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from shardwise.checkpoint.pieces import Form


MODEL, OPTIMIZER = "model/", "optimizer/"
BATCH_BYTES = 256 << 20
"""Bytes of tensors that are read at a time where they need not all be there at once."""


@dataclass(frozen=True)
class Contents:
    """Tensors that are read when they are asked for, and facts.

    Facts that are understood here: `optimizer.groups`, a list of settings with `params` (names) in each, and `tied`,
    which gives for each weight that is another one's alias the name that holds the values.
    """

    kind: str
    step: int
    forms: dict[str, Form]
    """Dtype name and whole shape by name: model/NAME, optimizer/PARAMETER/KEY, anything else."""
    facts: dict[str, Any]
    read: Callable[[Collection[str]], dict[str, Tensor]]
    """Returns the named tensors, whole, on the host."""
    left_out: tuple[str, ...] = ()
    """What of the source is not in here, one sentence each."""

    @property
    def tied(self) -> dict[str, str]:
        """Weights that are others' aliases: name -> the name that holds the values, both without "model/"."""
        tied = self.facts.get("tied")
        return {
            alias: name
            for alias, name in (tied.items() if isinstance(tied, dict) else ())
            if isinstance(name, str) and MODEL + name in self.forms and MODEL + alias not in self.forms
        }

    @property
    def lora(self) -> dict[str, Any] | None:
        """What is known of adapters (see Lora.facts); None where there are none."""
        return facts_of(self.facts)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Settings of the optimizer's parameter groups, as far as they are known."""
        optimizer = self.facts.get("optimizer")
        groups = optimizer.get("groups") if isinstance(optimizer, dict) else None
        return [dict(group) for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []

    def states(self) -> dict[str, dict[str, str]]:
        """Return optimizer states: parameter -> key -> full name."""
        found: dict[str, dict[str, str]] = {}
        for name in self.forms:
            if name.startswith(OPTIMIZER):
                parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
                found.setdefault(parameter, {})[key] = name
        return found

    def batches(self, max_bytes: int = BATCH_BYTES) -> Iterator[dict[str, Tensor]]:
        """Yield all tensors in order, as many at a time as `max_bytes` hold, at least one."""
        for names in self.split(self.forms, max_bytes):
            yield self.read(names)

    def split(self, names: Collection[str], max_bytes: int) -> list[list[str]]:
        """Return `names` in parts of at most `max_bytes` each, unless a single tensor is larger."""
        parts: list[list[str]] = []
        free_bytes = 0
        for name in names:
            size = bytes_of(self.forms[name])
            if not parts or size > free_bytes:
                parts.append([])
                free_bytes = max_bytes
            parts[-1].append(name)
            free_bytes -= size
        return parts

    def only_weights(self) -> Contents:
        """Return the same without optimizer, step, and facts but those about weights."""
        forms = {name: form for name, form in self.forms.items() if name.startswith(MODEL)}
        facts = {"tied": self.tied, "lora": self.lora}
        return dataclasses.replace(self, step=0, forms=forms, facts={key: fact for key, fact in facts.items() if fact})


def bytes_of(form: Form) -> int:
    """Return how many bytes a tensor of this form has."""
    return DTYPES[form[0]].itemsize * torch.Size(form[1]).numel()


def form_of(name: str, tensor: Tensor) -> Form:
    """Return the form of a plain host tensor; any other kind is refused by name."""
    if type(tensor) not in {Tensor, nn.Parameter} or tensor.layout != torch.strided or tensor.is_meta:
        kind = f"a {type(tensor).__name__} ({tensor.layout}, {tensor.device.type})"
        raise InputError(
            f"tensor {name!r} is {kind}", code="checkpoint.tensor-not-plain", fix="save whole, plain tensors"
        )
    return form_from(name, tensor.dtype, tuple(tensor.shape))


def form_from(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Form:
    """Return the form of a tensor; a dtype that a checkpoint cannot hold is refused by name."""
    if dtype not in CODES:
        raise InputError(
            f"tensor {name!r} is {dtype}", code="checkpoint.dtype-unsupported", fix=f"use one of {', '.join(DTYPES)}"
        )
    return CODES[dtype], shape


def find_ties(contents: Contents) -> Contents:
    """Return the same with weights that are copies of another one listed as tied to it; reads what may be one.

    A matrix is a copy if another has the same bits and it has no optimizer state of its own where any has: a state
    dict of a model with tied weights names them all, an optimizer only one. Constant matrices prove nothing.
    """
    states = contents.states()
    originals: dict[tuple[Form, int], str] = {}
    matrices = {
        name: form for name, form in contents.forms.items() if name.startswith(MODEL) and len(form[1]) > 1 and form[1]
    }
    # Those with a state first: they are the ones that others are copies of.
    ordered = sorted(matrices, key=lambda name: name.removeprefix(MODEL) not in states)
    repeated = {form for form, count in Counter(matrices.values()).items() if count > 1}
    tied: dict[str, str] = {}
    for part in contents.split([name for name in ordered if matrices[name] in repeated], BATCH_BYTES):
        for name, tensor in contents.read(part).items():
            bits = _bits(tensor)
            if bits is None:
                continue
            short = name.removeprefix(MODEL)
            original = originals.setdefault((matrices[name], bits), short)
            if original != short and not (short in states and original in states):
                tied[short] = original
    if not tied:
        return contents
    forms = {name: form for name, form in contents.forms.items() if name.removeprefix(MODEL) not in tied}
    return dataclasses.replace(contents, forms=forms, facts={**contents.facts, "tied": {**contents.tied, **tied}})


def _bits(tensor: Tensor) -> int | None:
    """Return a fingerprint of the values; None if they are all the same."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    rows = data.view(-1, tensor.element_size())
    if len(rows) < 2 or bool((rows == rows[0]).all()):
        return None
    return int.from_bytes(hashlib.blake2b(data.numpy().data, digest_size=16).digest(), "little")


# Our own checkpoint as the source or the target of a conversion.


def read_own(path: Path) -> Contents:
    """Return what a checkpoint holds, of several the newest good one; bytes are checked when they are read."""
    found = find_checkpoints(path)
    if found != [path]:
        entry, damages = CheckpointFolder(found[0].parent).newest_good(deep=False)
        if entry is None:
            raise InputError(
                f"{path} holds no good checkpoint ({damages[0]})", code="checkpoint.none-usable", fix="name another one"
            )
        path = entry.path
    manifest = read_manifest(path)

    def get(names: Collection[str]) -> dict[str, Tensor]:
        entries = {name: manifest.tensors[name] for name in names}
        tensors = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in entries.items()}
        filling = Filling(path, manifest, tensors)
        filling.plan()
        filling.check()
        filling.fill()
        return tensors

    return Contents(
        kind="shardwise",
        step=manifest.step,
        forms={name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()},
        facts=manifest.facts,
        read=get,
    )


def write_own(contents: Contents, path: Path) -> list[str]:
    """Write a new checkpoint, which can hold everything, a few hundred megabytes at a time."""
    folder = path.with_name(path.name + ".saving")
    forms = {
        name: torch.empty(shape, dtype=DTYPES[code], device="meta") for name, (code, shape) in contents.forms.items()
    }
    Draft(folder, contents.step, forms, contents.facts, None).write(lambda: Streamed(contents))
    (folder / name_of(contents.step)).rename(path)
    for rest in folder.iterdir():
        rest.unlink()
    folder.rmdir()
    return []


class Streamed(Mapping[str, Tensor]):
    """Tensors of a checkpoint, read in parts in the order of a shard file; one part is in memory at a time."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._parts = contents.split(list(ShardLayout.of(contents.forms).places), BATCH_BYTES)
        self._part_of = {name: part for part in self._parts for name in part}
        self._part: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._part:
            self._part = {}  # before the next part comes, not after
            self._part = self._contents.read(self._part_of[name])
        return self._part[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)
