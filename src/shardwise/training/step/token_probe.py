"""The token probe: under context parallelism, detect modules other than attention that mix tokens.

Ranks run the model on slices of the sequence, and only attention communicates between them. A convolution over time, a
shift or a pooling outside attention would treat the edge of a slice as the end of the sequence, without an error. The
probe runs the model twice on a short unsharded sequence, with attention in which each token attends only to itself; the
second run changes one token. If values at other tokens change, the model mixes tokens outside attention.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.data.rows import map_tensors, tensors
from shardwise.errors import JobError
from shardwise.models.documents import block_attention
from shardwise.parallel.float8 import without_float8
from shardwise.torch_private.dispatch import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from shardwise.data.feed import StepBatch

_LENGTH = 13
"""Number of tokens in the probe: enough for windows of 6 tokens on both sides of the changed one."""
_CLOSE = 1e-2
"""Tolerance relative to the largest value: rounding changes a token by less, mixing changes it by more."""

Summaries = list[tuple[str, "Tensor | None", "Tensor | None"]]
"""Modules in the order in which their forward ends: name, and per-token summaries of inputs and outputs."""


class TokenProbe:
    """Rejects a model that mixes tokens outside attention, before the first step."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Any, Any], Any],
        group: dist.ProcessGroup,
        note: Callable[[str], None],
    ) -> None:
        """Create the probe of a model under context parallelism.

        `group` is the host group of all ranks, so that either all ranks raise or none. `note` receives a message if the
        model does not run on a short sequence.
        """
        self._model = model
        self._forward = forward
        self._group = group
        self._note = note
        self._is_done = False

    def __call__(self, batch: StepBatch) -> None:
        """Probe the model on tokens of the first batch. Communicates over the group; call on every rank."""
        if self._is_done:
            return
        self._is_done = True
        names: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(names, self._find_mixing(batch.micro_batches[0].unsharded), group=self._group)
        name = next(filter(None, names), None)
        if name is not None:
            raise JobError(
                f"{name} mixes tokens outside attention, which context parallelism does not support",
                code="support.cp-mixes-tokens",
                fix="use a plan with cp = 1",
            )

    def _find_mixing(self, whole: Any) -> str | None:
        """Return the first module in which a change of one token changes other tokens; None if there is none."""
        like = next(self._model.parameters())
        cropped = map_tensors(lambda tensor: _crop(tensor, like), whole)
        length = max((tensor.shape[1] for tensor in tensors(cropped) if tensor.ndim > 1), default=0)
        changed = map_tensors(lambda tensor: _change_token(tensor, length // 2), cropped)
        try:
            with _probe_mode(self._model), torch.no_grad(), _SelfAttention():
                before = _summaries(self._model, length, lambda: self._forward(self._model, cropped))
                after = _summaries(self._model, length, lambda: self._forward(self._model, changed))
        except Exception as error:  # noqa: BLE001 - a model may raise any error on an unexpected sequence length
            kind = type(error).__name__
            self._note(f"cp: the check for token mixing outside attention was skipped ({kind}: {error})")
            return None
        return _first_mixed(before, after, length // 2)


class _SelfAttention(TorchFunctionMode):
    """Replaces attention by one in which every token attends only to itself."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in {functional.scaled_dot_product_attention, block_attention}:
            return function(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        query, value = given["query"], given["value"]
        if value.shape[-2] != query.shape[-2]:
            # Cross-attention to another sequence does not mix the tokens of this sequence.
            return query.new_zeros(*query.shape[:-1], value.shape[-1])
        if value.ndim > 3:  # grouped-query attention
            return value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        return value.clone()


@contextmanager
def _probe_mode(model: Any) -> Iterator[None]:
    """Put a model into eval mode for unsharded sequences in this context, and restore its modes afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    random = torch.get_rng_state()
    model.eval()
    model.context_switch.is_on = False
    try:
        with (
            without_float8(model),
            torch.compiler.set_stance("force_eager"),
        ):  # compiling takes longer than two eager runs
            yield
    finally:
        model.context_switch.is_on = True
        torch.set_rng_state(random)
        for part, was_training in modes:
            part.training = was_training


def _crop(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the first tokens of the first row on the device of `like`; floating-point tensors also in its dtype."""
    cropped = tensor
    if tensor.ndim > 1:
        cropped = tensor[:1, :_LENGTH]
    elif tensor.ndim:
        cropped = tensor[:1]
    if cropped.is_floating_point():
        return cropped.to(like)
    return cropped.to(like.device)


def _change_token(tensor: Tensor, position: int) -> Tensor:
    """Return a batch tensor with a different token at `position`; integer tokens become another value of the tensor."""
    if tensor.ndim < 2 or tensor.dtype == torch.bool or tensor.shape[1] <= position:
        return tensor
    changed, current = tensor.clone(), tensor[:, position]
    if tensor.is_floating_point():
        changed[:, position] = current + 1
        return changed
    values = tensor.unique()
    changed[:, position] = torch.where(current == values[0], values[-1], values[0])
    return changed


def _summaries(model: nn.Module, length: int, run: Callable[[], Any]) -> Summaries:
    """Run a model and return per-token summaries of the inputs and outputs of each module."""
    found: Summaries = []

    def record(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found.append((name, _by_token((args, kwargs), length), _by_token(output, length)))

        return hook

    hooks = [part.register_forward_hook(record(name), with_kwargs=True) for name, part in model.named_modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _by_token(values: Any, length: int) -> Tensor | None:
    """Return the norm and the sum per token, as [tokens, 2 x tensors], of tensors [1, tokens, ...] or [tokens, ...]."""
    columns = []
    for leaf in tree_leaves(values):
        # In [1, heads, tokens, width], which only attention uses, heads would be mistaken for tokens.
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.ndim > 3:
            continue
        if leaf.ndim > 1 and leaf.shape[:2] == (1, length):
            rows = leaf[0]
        elif leaf.ndim > 1 and leaf.shape[0] == length:
            rows = leaf
        else:
            continue
        rows = rows.double().flatten(1)
        columns += [rows.norm(dim=1), rows.sum(dim=1)]
    if not columns:
        return None
    return torch.stack(columns, 1)


def _first_mixed(before: Summaries, after: Summaries, position: int) -> str | None:
    """Return the first module whose output differs at tokens other than the changed one."""
    for (name, inputs, outputs), (_, other_inputs, other_outputs) in zip(before, after, strict=False):
        if not _differ(outputs, other_outputs, position):
            continue
        if _differ(inputs, other_inputs, position):
            name = name.rpartition(".")[0]  # noqa: PLW2901 - the inputs are already mixed, in the parent's forward
        return name or "the model"
    return None


def _differ(one: Tensor | None, other: Tensor | None, position: int) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    change = (one - other).abs()
    change[position] = 0
    return bool((change > _CLOSE * one.abs().amax(dim=0)).any())
