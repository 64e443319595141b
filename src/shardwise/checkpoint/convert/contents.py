"""The format-independent contents of a checkpoint, for conversions, and the reader and writer of shardwise's format."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.checkpoint.directory import CheckpointDirectory, find_checkpoints, follow_name
from shardwise.checkpoint.manifest import CODES, DTYPES, read_manifest
from shardwise.checkpoint.names import name_of
from shardwise.checkpoint.read import TensorLoader
from shardwise.checkpoint.shard import ShardLayout
from shardwise.checkpoint.write import PlannedSave
from shardwise.errors import InputError
from shardwise.job.lora import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from shardwise.checkpoint.manifest import Form


MODEL, OPTIMIZER = "model/", "optimizer/"
"""Name prefixes of model weights and optimizer states."""
BATCH_BYTES = 256 << 20
"""Number of bytes of tensors that a streaming conversion reads at a time."""
V = TypeVar("V")


@dataclass(frozen=True)
class Contents:
    """The lazily read tensors of a checkpoint, and its metadata.

    Conversions use two metadata keys: `optimizer.groups`, a list of parameter groups with parameter names in
    `params`, and `tied`, which maps the alias of a tied weight to the name under which its values are stored.
    """

    kind: str
    step: int
    forms: dict[str, Form]
    """Dtype and global shape by tensor name: model/NAME, optimizer/PARAMETER/KEY, or any other name."""
    facts: dict[str, Any]
    read: Callable[[Collection[str]], dict[str, Tensor]]
    """Reads the named tensors into host memory, unsharded."""
    left_out: tuple[str, ...] = ()
    """Contents of the source that were ignored, one sentence each."""

    @property
    def weights(self) -> list[str]:
        """Names of the model weights and buffers, with the prefix "model/"."""
        return [name for name in self.forms if name.startswith(MODEL)]

    @property
    def tied(self) -> dict[str, str]:
        """Tied weights: alias -> name under which the values are stored, both without the prefix "model/"."""
        tied = _mapping(self.facts.get("tied"))
        return {alias: name for alias, name in tied.items() if self._is_tie(alias, name)}

    @property
    def lora(self) -> dict[str, Any] | None:
        """The LoRA configuration (see Lora.facts), or None if the checkpoint has no adapters."""
        return facts_of(self.facts)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer; empty if they are unknown."""
        groups = _mapping(self.facts.get("optimizer")).get("groups")
        if not isinstance(groups, list):
            return []
        return [dict(group) for group in groups if isinstance(group, dict)]

    def _is_tie(self, alias: str, name: object) -> bool:
        return isinstance(name, str) and MODEL + name in self.forms and MODEL + alias not in self.forms

    def states(self) -> dict[str, dict[str, str]]:
        """Return the names of the optimizer states: parameter -> key -> full tensor name."""
        found: dict[str, dict[str, str]] = {}
        for name in self.forms:
            if name.startswith(OPTIMIZER):
                parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
                found.setdefault(parameter, {})[key] = name
        return found

    def batches(self, max_bytes: int = BATCH_BYTES) -> Iterator[dict[str, Tensor]]:
        """Yield all tensors in order, in batches of at most `max_bytes` with at least one tensor."""
        for names in self.split(self.forms, max_bytes):
            yield self.read(names)

    def split(self, names: Collection[str], max_bytes: int) -> list[list[str]]:
        """Split tensor names into batches of at most `max_bytes` each; a larger tensor is a separate batch."""
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
        """Return contents with the model weights and their ties and adapters only, at step 0."""
        facts: dict[str, Any] = {}
        if self.tied:
            facts["tied"] = self.tied
        if self.lora:
            facts["lora"] = self.lora
        return dataclasses.replace(self.select(self.weights), step=0, facts=facts)

    def select(self, names: Collection[str]) -> Contents:
        """Return contents with the named tensors only."""
        return dataclasses.replace(self, forms={name: self.forms[name] for name in names})


def short_names(weights: Mapping[str, V]) -> dict[str, V]:
    """Return the mapping with the prefix "model/" removed from its keys."""
    return {name.removeprefix(MODEL): value for name, value in weights.items()}


def bytes_of(form: Form) -> int:
    """Return the size in bytes of a tensor with this dtype and shape."""
    return DTYPES[form[0]].itemsize * torch.Size(form[1]).numel()


def form_of(name: str, tensor: Tensor) -> Form:
    """Return dtype and shape of a dense tensor; raise an InputError for a subclass, sparse or meta tensor."""
    if type(tensor) not in {Tensor, nn.Parameter} or tensor.layout != torch.strided or tensor.is_meta:
        kind = f"a {type(tensor).__name__} ({tensor.layout}, {tensor.device.type})"
        raise InputError(
            f"tensor {name!r} must be a dense torch.Tensor, got {kind}",
            code="checkpoint.tensor-not-plain",
            fix="save unsharded dense tensors",
        )
    return form_from(name, tensor.dtype, tuple(tensor.shape))


def form_from(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Form:
    """Return the safetensors name of a dtype and the shape; raise an InputError if the dtype is not supported."""
    if dtype not in CODES:
        raise InputError(
            f"tensor {name!r} has the unsupported dtype {dtype}",
            code="checkpoint.dtype-unsupported",
            fix=f"use one of {', '.join(DTYPES)}",
        )
    return CODES[dtype], shape


def find_ties(contents: Contents) -> Contents:
    """Return contents in which duplicates of a weight are listed as tied to it.

    The state dict of a model with tied weights contains all of them, whereas the optimizer has the state of only one.
    Two matrices are therefore tied if they are bitwise equal and at most one of them has optimizer state. Constant
    matrices are never tied. Only matrices of equal shape are read.
    """
    states = contents.states()
    originals: dict[tuple[Form, int], str] = {}
    matrices = {name: contents.forms[name] for name in contents.weights if len(contents.forms[name][1]) > 1}
    # Weights with optimizer state come first, because weights without it are the duplicates.
    ordered = sorted(matrices, key=lambda name: name.removeprefix(MODEL) not in states)
    num_same = Counter(matrices.values())
    tied: dict[str, str] = {}
    for part in contents.split([name for name in ordered if num_same[matrices[name]] > 1], BATCH_BYTES):
        for name, tensor in contents.read(part).items():
            fingerprint = _fingerprint(tensor)
            if fingerprint is None:
                continue
            short = name.removeprefix(MODEL)
            original = originals.setdefault((matrices[name], fingerprint), short)
            if original != short and not (short in states and original in states):
                tied[short] = original
    if not tied:
        return contents
    contents = contents.select([name for name in contents.forms if name.removeprefix(MODEL) not in tied])
    return dataclasses.replace(contents, facts={**contents.facts, "tied": {**contents.tied, **tied}})


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _fingerprint(tensor: Tensor) -> int | None:
    """Return a hash of the values, or None if all elements are equal."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    rows = data.view(-1, tensor.element_size())
    if len(rows) < 2 or bool((rows == rows[0]).all()):
        return None
    return int.from_bytes(hashlib.blake2b(data.numpy().data, digest_size=16).digest(), "little")


def read_shardwise(path: Path) -> Contents:
    """Return the contents of a checkpoint, or of the newest intact one in a directory; reading verifies checksums."""
    path = follow_name(path)
    found = find_checkpoints(path)
    if found != [path]:
        entry, damages = CheckpointDirectory(found[0].parent).newest_good(deep=False)
        if entry is None:
            raise InputError(
                f"all checkpoints in {path} are damaged ({damages[0]})",
                code="checkpoint.none-usable",
                fix="pass a different checkpoint",
            )
        path = entry.path
    manifest = read_manifest(path)

    def read(names: Collection[str]) -> dict[str, Tensor]:
        tensors = {}
        for name in names:
            entry = manifest.tensors[name]
            tensors[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        loader = TensorLoader(path, manifest, tensors)
        loader.plan()
        loader.check()
        loader.fill()
        return tensors

    return Contents(
        kind="shardwise",
        step=manifest.step,
        forms={name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()},
        facts=manifest.facts,
        read=read,
    )


def write_shardwise(contents: Contents, path: Path) -> list[str]:
    """Write a new checkpoint, reading BATCH_BYTES at a time; return [] because the format represents all contents."""
    directory = path.with_name(path.name + ".saving")
    tensors = {}
    for name, (code, shape) in contents.forms.items():
        tensors[name] = torch.empty(shape, dtype=DTYPES[code], device="meta")
    PlannedSave(directory, contents.step, tensors, contents.facts, None).write(lambda: StreamedTensors(contents))
    (directory / name_of(contents.step)).rename(path)
    for rest in directory.iterdir():
        rest.unlink()
    directory.rmdir()
    return []


class StreamedTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint, read in batches in the order of a shard file; one batch is in memory at a time."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._batch_of: dict[str, list[str]] = {}
        for names in contents.split(list(ShardLayout.of(contents.forms).ranges), BATCH_BYTES):
            self._batch_of |= dict.fromkeys(names, names)
        self._batch: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._batch:
            self._batch = {}  # frees the previous batch before the next one is read
            self._batch = self._contents.read(self._batch_of[name])
        return self._batch[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch_of)

    def __len__(self) -> int:
        return len(self._batch_of)
