"""Output heads that are computed with the loss: by a fused loss in chunks of tokens, or in one compiled graph.

In both forms, the head returns its input to the model. A fused loss never has all logits. A compiled graph of head and
loss pads a vocabulary whose size is slow for matrix products.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.errors import JobError
from shardwise.job.losses import IGNORE, TOKEN_LOSSES, logits_of, token_sum
from shardwise.parallel.linear_cross_entropy import VocabularyShard, linear_cross_entropy
from shardwise.parallel.lora import has_adapter
from shardwise.parallel.recompute import block_of, find_blocks
from shardwise.parallel.skeleton import skeleton
from shardwise.parallel.stages import Stage
from shardwise.plans.rules import padded_vocabulary
from shardwise.torch_private.dispatch import has_output_hooks, register_pytree_node, tree_map, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardwise.job import Job, Loss

_OFF = "pass --set fused_loss=false"


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """A placeholder for logits [..., vocabulary] that stores the hidden states and the head instead.

    It supports indexing or flattening rows and tokens, casting to float, and torch's cross entropy. Any other operation
    raises JobError.
    """

    hidden: Tensor
    head: nn.Module

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        vocabulary: int = self.head.weight.shape[0]  # type: ignore[index, assignment]
        return torch.Size((*self.hidden.shape[:-1], vocabulary))

    @property
    def ndim(self) -> int:
        """The number of dimensions of the logits."""
        return self.hidden.ndim

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.hidden.device

    def size(self, dim: int | None = None) -> int | torch.Size:
        """Return the size of dimension `dim` of the logits, or their shape if `dim` is None."""
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> DeferredLogits:
        """Return self, because cross entropy is computed in fp32 or fp64 anyway."""
        return self

    def contiguous(self) -> DeferredLogits:
        """Return self, because deferred logits have no memory format."""
        return self

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits:
        """Flatten the dimensions from `start_dim` to `end_dim`, which must not include the vocabulary."""
        if end_dim in {-1, self.ndim - 1}:
            raise _touched("flatten")
        return replace(self, hidden=self.hidden.flatten(start_dim, end_dim))

    def view(self, *shape: int) -> DeferredLogits:
        """Return the logits reshaped to [-1, vocabulary], the only supported shape."""
        if shape != (-1, self.shape[-1]):
            raise _touched("view")
        return self.flatten(0, -2)

    reshape = view

    def __getitem__(self, index: Any) -> DeferredLogits:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) >= self.ndim or not all(isinstance(each, slice) for each in indices):
            raise _touched("an index")
        return replace(self, hidden=self.hidden[index])

    def compute(self) -> Tensor:
        """Return the full logits."""
        forward: Any = self.head.forward
        logits: Tensor = forward.plain(self.hidden)
        return logits

    def entropy_sum(self, target: Tensor, ignore: int) -> Tensor:
        """Return the sum of the cross entropies of logits [rows, vocabulary]; communicates over the tp axis."""
        weight: Any = self.head.weight
        bias: Any = self.head.bias
        return linear_cross_entropy(
            self.hidden,
            _local(weight),
            None if bias is None else _local(bias),
            target,
            ignore=ignore,
            shard=_shard(weight),
        )

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not nn.functional.cross_entropy:
            raise _touched(getattr(function, "__name__", str(function)))
        return _cross_entropy(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _touched(name)

    def _reject(self, *_: Any) -> Any:
        raise _touched("an operator")

    __add__ = __sub__ = __mul__ = __truediv__ = __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __neg__ = _reject
    __matmul__ = __pow__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __len__ = _reject
    __hash__ = object.__hash__


# DDP and FSDP2 search the model's output for tensors to register gradient hooks.
register_pytree_node(
    DeferredLogits,
    lambda deferred: ([deferred.hidden], deferred.head),
    lambda children, head: DeferredLogits(next(iter(children)), head),
)


def _touched(how: str) -> JobError:
    return JobError(
        f"fused_loss supports only cross entropy on the logits, but the loss or the model uses {how}",
        code="support.fused-loss-logits-read",
        fix=_OFF,
    )


def _cross_entropy(  # noqa: PLR0917 - torch's signature
    input: DeferredLogits,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001
    ignore_index: int = -100,
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` for targets that are class indices; communicates over the tp axis."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not isinstance(input, DeferredLogits):
        raise _touched("logits in cross_entropy as targets")
    if not plain or reduction not in {"sum", "mean"} or target.is_floating_point():
        raise _touched("cross_entropy with class weights, smoothing or reduction='none'")
    if input.ndim != 2 or target.shape != input.shape[:-1]:
        raise JobError(
            f"cross entropy requires logits [N, C] and targets [N], got {list(input.shape)} and {list(target.shape)}",
            code="loss.logits-targets-mismatch",
            fix="flatten logits to [tokens, vocabulary] and targets to [tokens]",
        )
    total = input.entropy_sum(target, ignore_index)
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, or the parameter itself if it is not sharded."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=parameter.placements)


def _shard(weight: Tensor) -> VocabularyShard | None:
    if not isinstance(weight, DTensor) or weight.placements != (Shard(0),):
        return None
    mesh, size = weight.device_mesh, weight.shape[0]
    first = min(size, mesh.get_local_rank() * -(-size // mesh.size()))  # as DTensor: ceil(size / ranks) rows each
    return VocabularyShard(group=mesh.get_group(), first=first, vocabulary=size)


class _Deferring:
    """The forward of a fused head, which defers logits in training and, if enabled, in evaluation."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.plain: Callable[[Tensor], Tensor] = head.forward
        self.in_evaluation = False

    def __call__(self, input: Tensor) -> Tensor | DeferredLogits:  # noqa: A002 - the name is torch's
        if self.head.training or self.in_evaluation:
            return DeferredLogits(input, self.head)
        return self.plain(input)


def fuse_head(module: nn.Module) -> None:
    """Make the output head of `module` return DeferredLogits; a pipeline stage without a head is unchanged."""
    head = find_head(module.user_module if isinstance(module, Stage) else module)
    if next(head.parameters(recurse=False), None) is None:
        return  # the head is on another stage
    if isinstance(head.weight, DTensor) and head.weight.placements not in {(Shard(0),), (Replicate(),)}:
        raise JobError(
            "fused_loss requires an output head that is sharded by outputs, but a tensor rule shards it by inputs",
            code="support.fused-loss-split-head",
            fix=f'set the tensor rule of the head to "column_gathered", or {_OFF}',
        )
    head.forward = _Deferring(head)  # type: ignore[assignment]


def find_head(module: nn.Module) -> nn.Linear:
    """Return the linear layer that computes logits: get_output_embeddings() of transformers models, or `head`."""
    getter = getattr(module, "get_output_embeddings", None)
    head = getter() if callable(getter) else getattr(module, "head", None)
    if type(head) is not nn.Linear:
        found = "has neither"
        if head is not None:
            found = f"has a {type(head).__name__}"
        raise JobError(
            "fused_loss requires an nn.Linear output head, named `head` or returned by get_output_embeddings(), but"
            f" {type(module).__name__} {found}",
            code="support.fused-loss-no-head",
            fix=f"name the output layer `head`, or {_OFF}",
        )
    if has_adapter(head):
        raise JobError(
            "fused_loss does not support an output head with a LoRA adapter",
            code="support.fused-loss-adapted-head",
            fix=_OFF,
        )
    return head


def deferring_heads(module: nn.Module) -> list[_Deferring]:
    """Return the replaced forwards of the fused heads in a model; empty without fused_loss."""
    forwards = (child.__dict__.get("forward") for child in module.modules())
    return [forward for forward in forwards if isinstance(forward, _Deferring)]


@contextmanager
def deferred_in_evaluation(heads: Sequence[_Deferring]) -> Iterator[None]:
    """Return a context in which fused heads defer their logits in evaluation too."""
    for head in heads:
        head.in_evaluation = True
    try:
        yield
    finally:
        for head in heads:
            head.in_evaluation = False


def with_logits(output: Any) -> Any:
    """Return a model's output with deferred logits replaced by the computed logits."""
    return tree_map(_computed, output, is_leaf=lambda leaf: isinstance(leaf, DeferredLogits))


def _computed(leaf: Any) -> Any:
    return leaf.compute() if isinstance(leaf, DeferredLogits) else leaf


# A head that a compiled graph computes together with the loss, because only the loss reads its logits.


def separable_head(job: Job, sample: Callable[[], Any], device_type: str, dtype: torch.dtype | None) -> str:
    """Return the name of the output head whose logits only the loss reads; "" if there is none.

    The loss reads the output of `job.forward`: either the result of the head, or an output that contains it as its
    logits, if the loss reads only those. Runs forward on a batch of `sample`, which returns None if there is none, in a
    copy of the model on the meta device, under autocast to `dtype`, with a placeholder for the logits that raises if it
    is used. "" if this fails, as it does for a model whose forward reads values; if the model changes autocast for its
    head on `device_type`; and if the head is more than an nn.Linear. May consume random numbers.
    """
    if job.lora is not None or job.masks == "keyed":
        return ""
    try:  # ranks compare their answers next, so that none may raise here
        batch = sample()
        model = skeleton(job.model).module
        if batch is None or any(not parameter.is_meta for parameter in model.parameters()):
            return ""  # the latter is a model that the job returns each time, which must stay on its device
        model = model.to("meta")  # buffers, too
        head = find_head(model)
    except Exception:  # noqa: BLE001 - a model may raise any exception on meta tensors
        return ""
    name = next(name for name, module in model.named_modules() if module is head)
    if "forward" in vars(head) or has_output_hooks(head) or block_of(name, find_blocks(model)):
        return ""
    placeholder = DeferredLogits if job.loss in TOKEN_LOSSES else _UncastLogits
    autocast = torch.autocast(device_type, dtype or torch.bfloat16, enabled=dtype is not None)
    returned: list[DeferredLogits] = []

    def defer(hidden: Tensor) -> DeferredLogits:
        logits = placeholder(hidden, head)
        is_enabled = torch.is_autocast_enabled(device_type)
        if is_enabled == (dtype is not None) and (not is_enabled or torch.get_autocast_dtype(device_type) == dtype):
            returned.append(logits)
        return logits

    meta_batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), batch)
    head.forward = defer  # type: ignore[method-assign, assignment]
    try:
        with torch.no_grad(), autocast:
            output = job.forward(model, meta_batch)
            read = logits_of(output) if job.loss in TOKEN_LOSSES else output
    except Exception:  # noqa: BLE001 - as above
        return ""
    return name if len(returned) == 1 and read is returned[0] else ""


class _UncastLogits(DeferredLogits):
    """Deferred logits of which a model must return no other dtype, because the job's own loss may read their dtype."""

    def float(self) -> DeferredLogits:
        raise _touched("float")


class LogitsChangedError(Exception):
    """The logits that a model returns are not the result of its head, although they were on the meta device."""


class SeparateHead:
    """Computes the logits and the loss of a `separable_head` after forward, in which its layer returns its input."""

    def __init__(self, layer: nn.Linear, loss: Loss) -> None:
        self.layer = layer
        self._loss = loss
        size = layer.weight.shape[0]
        self._padded_pair = TOKEN_LOSSES.get(loss) if padded_vocabulary(size) != size else None
        """Returns logits and targets for a padded vocabulary; None if it is not padded."""
        self._inputs: list[Tensor] = []

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Return a context in which the layer returns its input, so that forward returns hidden states, not logits."""
        self._inputs.clear()
        self.layer.forward = self._record  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del self.layer.forward

    def _record(self, hidden: Tensor) -> Tensor:
        self._inputs.append(hidden)
        return hidden

    def input_of(self, output: Any) -> Tensor:
        """Return the hidden states in the output of forward; raises LogitsChangedError if the model changed them."""
        hidden: Tensor = logits_of(output)
        if len(self._inputs) != 1 or hidden is not self._inputs[0]:
            raise LogitsChangedError
        self._inputs.clear()
        return hidden

    def loss_sum(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, batch: Any) -> Tensor:
        """Return the loss sum of a batch; FSDP passes the gathered weight and bias of the layer."""
        if self._padded_pair is None:
            return self._loss.sum_of(nn.functional.linear(hidden, weight, bias), batch)  # type: ignore[no-any-return]
        logits, targets = self._padded_pair(padded_logits(hidden, weight, bias), batch)
        return token_sum(logits, _checked(targets, weight.shape[0]))  # type: ignore[no-any-return]


def padded_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits with a padded vocabulary; the added ones are -inf, which changes no cross entropy of real classes.

    Without it, inductor pads the operands of all three matrix products, for which it copies the logits: with GPT-2's
    vocabulary of 50,257, a compiled step takes 1.05 times as long on an H200, and memory for the logits a second time.
    """
    size = weight.shape[0]
    missing = padded_vocabulary(size) - size
    weight = nn.functional.pad(weight, (0, 0, 0, missing))
    if bias is not None:
        bias = nn.functional.pad(bias, (0, missing))
    logits = nn.functional.linear(hidden, weight, bias)
    is_class = torch.arange(size + missing, device=logits.device) < size
    return torch.where(is_class, logits, float("-inf"))


def _checked(targets: Tensor, size: int) -> Tensor:
    """Return the targets; the lookup raises for targets beyond the classes, which the padding has logits of."""
    is_counted = targets != IGNORE
    classes = torch.arange(size, device=targets.device)
    return torch.where(is_counted, classes[torch.where(is_counted, targets, 0)], IGNORE)
