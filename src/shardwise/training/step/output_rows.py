"""Which tensors of a model's output hold rows: those computed from the batch.

Padding rows of a short micro-batch are dropped from the output before the loss sees it. An output that only depends on
the model (a table of prototypes, a codebook) may happen to be as long as the micro-batch and must stay whole. Where an
output has several tensors of that length, the first short forward pass is watched operator by operator: what reads the
batch, or anything computed from it, belongs to the batch.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from shardwise.data.rows import RowMarks, cut_output, mark_rows, tensors

if TYPE_CHECKING:
    from collections.abc import Iterator


class OutputRows:
    """Drops padding rows from outputs; remembers which of their tensors hold rows."""

    def __init__(self) -> None:
        self._marks: RowMarks | None = None
        self._seen: _Descent | None = None
        self._is_clear = False

    def look(self, output: Any, rows: int) -> None:
        """Note of an output of full length whether one tensor at most has that length: then length alone decides."""
        self._is_clear = sum(mark_rows(output, rows)) <= 1

    @contextmanager
    def watching(self, *inputs: Any) -> Iterator[None]:
        """Surround the forward pass of a short micro-batch; costs nothing where the rows of outputs are known."""
        if self._is_clear or self._marks is not None:
            yield
            return
        self._seen = _Descent(tensors(inputs))
        with self._seen:
            yield

    def cut(self, output: Any, rows: int, filled: int) -> Any:
        """Keep the real rows of an output that has `filled` rows."""
        if self._seen is not None:
            descends = tuple(map(self._seen.includes, tensors(output)))
            # What runs outside of torch's dispatcher leaves no trace: then length decides, as for one tensor.
            self._marks = descends if any(descends) else (True,) * len(descends)
            self._seen = None
        return cut_output(output, rows, filled, self._marks)


class _Descent(TorchDispatchMode):
    """Follows which memory holds values computed from some tensors."""

    def __init__(self, roots: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: set[StorageWeakRef] = set()
        for root in roots:
            self._add(root)

    def includes(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from the roots."""
        return any(_memory_of(part) in self._memory for part in _parts(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(map(self.includes, given)):
            for made in pytree.tree_leaves(result):
                if isinstance(made, Tensor):
                    self._add(made)
        return result

    def _add(self, tensor: Tensor) -> None:
        self._memory.update(map(_memory_of, _parts(tensor)))


def _parts(tensor: Any) -> list[Tensor]:
    """Return a tensor and, of a wrapper such as a DTensor, what it holds on this rank."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts: list[Any] = [tensor, *(getattr(tensor, name) for name in names)]
    return [part for part in parts if isinstance(part, Tensor)]  # a DTensor also names its mesh


def _memory_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
