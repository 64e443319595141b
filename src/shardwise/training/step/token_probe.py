"""The token probe: under context parallelism, whether anything but attention looks at other tokens.

Ranks run the model on slices of the tokens, and only attention exchanges between them. A convolution over time, a shift
or a pooling outside of attention would take the edge of a slice for the end of the sequence, with no error. The probe
runs the model twice on a few whole tokens, with attention in which a token attends to itself alone; in the second run
one token is another. Whatever changes at the other tokens has been mixed outside of attention.
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
from shardwise.torch_private.dispatch import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from shardwise.data.feed import StepBatch

_LENGTH = 13
"""Tokens of the probe: enough for windows of 6 on both sides of the one in the middle."""
_CLOSE = 1e-2
"""Relative to the largest value: rounding changes a token less when another one changes, mixing more."""

Summaries = list[tuple[str, "Tensor | None", "Tensor | None"]]
"""Of the modules in the order in which they end: name, and by token what went in and what came out."""


class TokenProbe:
    """Refuses, before the first step, a model in which tokens are mixed outside of attention."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Any, Any], Any],
        group: dist.ProcessGroup,
        note: Callable[[str], None],
    ) -> None:
        """`model` is the user's own, under cp; `group` joins all ranks on the host, so that all refuse or none.

        `note` is told where the model does not run on a few tokens.
        """
        self._model = model
        self._forward = forward
        self._group = group
        self._note = note
        self._is_done = False

    def __call__(self, batch: StepBatch) -> None:
        """Probe the model on tokens of the first batch; communicates as its forward does, on every rank."""
        if self._is_done:
            return
        self._is_done = True
        everyone: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, self._mixing(batch.micro_batches[0].uncut), group=self._group)
        name = next((each for each in everyone if each is not None), None)
        if name is not None:
            raise JobError(
                f"cp splits sequences, and {name} mixes tokens outside of attention",
                code="support.cp-mixes-tokens",
                fix="use cp 1",
            )

    def _mixing(self, whole: Any) -> str | None:
        """Return the first module in which a token changes when another one does; None if there is none."""
        like = next(self._model.parameters())
        few = map_tensors(lambda tensor: _crop(tensor, like), whole)
        length = max((tensor.shape[1] for tensor in tensors(few) if tensor.ndim > 1), default=0)
        other = map_tensors(lambda tensor: _with_another(tensor, length // 2), few)
        try:
            with _aside(self._model), torch.no_grad(), _OwnValue():
                before = _summaries(self._model, length, lambda: self._forward(self._model, few))
                after = _summaries(self._model, length, lambda: self._forward(self._model, other))
        except Exception as error:  # noqa: BLE001 - whatever a model raises on a length that it does not expect
            kind = type(error).__name__
            self._note(f"cp: whether tokens are mixed outside of attention was not checked ({kind}: {error})")
            return None
        return _first_mixed(before, after, length // 2)


class _OwnValue(TorchFunctionMode):
    """Attention in which every token attends to itself alone."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        query, value = given["query"], given["value"]
        if value.shape[-2] != query.shape[-2]:  # over another sequence, which this one does not mix
            return query.new_zeros(*query.shape[:-1], value.shape[-1])
        repeats = query.shape[-3] // value.shape[-3] if value.ndim > 3 else 1
        return value.repeat_interleave(repeats, -3) if repeats > 1 else value.clone()


@contextmanager
def _aside(model: Any) -> Iterator[None]:
    """Run a model on whole sequences, without dropout, and leave it as it was."""
    modes = [(part, part.training) for part in model.modules()]
    random = torch.get_rng_state()
    model.eval()
    model.context_switch.is_on = False
    try:
        with torch.compiler.set_stance("force_eager"):  # a graph for these few tokens would not pay
            yield
    finally:
        model.context_switch.is_on = True
        torch.set_rng_state(random)
        for part, was_training in modes:
            part.training = was_training


def _crop(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the first tokens of the first row, on the device of a model; floats in its precision."""
    few = tensor
    if tensor.ndim > 1:
        few = tensor[:1, :_LENGTH]
    elif tensor.ndim:
        few = tensor[:1]
    return few.to(like.device, like.dtype if few.is_floating_point() else few.dtype)


def _with_another(tensor: Tensor, place: int) -> Tensor:
    """Return a batch tensor with another token at one place, of a value that occurs elsewhere in it."""
    if tensor.ndim < 2 or tensor.dtype == torch.bool or tensor.shape[1] <= place:
        return tensor
    changed, own = tensor.clone(), tensor[:, place]
    if tensor.is_floating_point():
        changed[:, place] = own + 1
        return changed
    values = tensor.unique()
    changed[:, place] = torch.where(own == values[0], values[-1], values[0])
    return changed


def _summaries(model: nn.Module, length: int, run: Callable[[], Any]) -> Summaries:
    """Run a model and return what went into and came out of each of its modules, in few numbers by token."""
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
    """Return norm and sum of each token, [tokens, 2 x tensors], of all tensors [1, tokens, ...] or [tokens, ...]."""
    columns = []
    for leaf in tree_leaves(values):
        # Heads before tokens ([1, heads, tokens, width]) would be taken for tokens; attention alone has them so.
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
    return torch.stack(columns, 1) if columns else None


def _first_mixed(before: Summaries, after: Summaries, place: int) -> str | None:
    """Return the module in which other tokens than the changed one change first."""
    for (name, given, made), (_, other_given, other_made) in zip(before, after, strict=False):
        if not _differ(made, other_made, place):
            continue
        holder = name if not _differ(given, other_given, place) else name.rpartition(".")[0]
        return holder or "the model"
    return None


def _differ(one: Tensor | None, other: Tensor | None, place: int) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    change = (one - other).abs()
    change[place] = 0
    return bool((change > _CLOSE * one.abs().amax(dim=0)).any())
