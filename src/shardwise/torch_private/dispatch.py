"""Autograd and the operators below it: dispatch modes, pytrees, schemas, kernels over lists, running nodes, hooks.

`TorchDispatchMode` is torch's documented way to see every operator, and the pytree functions its way through nested
outputs; both live in modules with an underscore in torch 2.11 and 2.13, and are passed on from here as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch, _pytree

from shardwise.torch_private.runtime import required

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Base class of modes that see every operator below autograd."""
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
"""Whether a tensor wraps others and unwraps itself, as DTensor does."""
is_traceable_wrapper_subclass_type = _python_dispatch.is_traceable_wrapper_subclass_type
"""The same of a class."""
tree_leaves = _pytree.tree_leaves
"""List what is in nested lists, tuples and dicts."""
tree_map = _pytree.tree_map
"""Apply a function to every leaf of a nested value."""
tree_map_only = _pytree.tree_map_only
"""Apply a function to the leaves of one type."""
tree_flatten = _pytree.tree_flatten
"""Take a nested value apart into its leaves and its form."""
tree_unflatten = _pytree.tree_unflatten
"""Put leaves back into a form."""
register_pytree_node = _pytree.register_pytree_node
"""Have all functions on nested values open a class; DDP and FSDP2 then find the tensors in it."""


def function_modes() -> list[Any]:
    """Return the `TorchFunctionMode`s that are on in this thread."""
    return list(_get_current_function_mode_stack())


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator that a dispatch mode sees: `name`, `arguments`, `returns`, `is_mutable`."""
    return operator._schema


def autocasts_on_cuda(operator: str) -> bool:
    """Whether autocast has a rule of its own for an operator on CUDA, such as "aten::rms_norm" since torch 2.12."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, "AutocastCUDA"))


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float, is_causal: bool, scale: float | None
) -> Any:
    """Return the output of CUDA's flash kernel of scaled dot product attention, also for meta tensors."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    return operator(query, key, value, dropout, is_causal, scale=scale)[0]


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, dropout: float, is_causal: bool,
    scale: float | None,
) -> Any:  # fmt: skip
    """Return the output of CUDA's memory-efficient kernel of attention, with what its backward reads."""
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    return operator(query, key, value, bias, True, dropout, is_causal, scale=scale)[0]  # noqa: FBT003 - torch's order


# Kernels over lists of tensors: one launch on a GPU for many tensors. torch's own clipping and GradScaler call them.


def norms_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor."""
    return torch._foreach_norm(list(tensors))


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every tensor in place with one number on their device."""
    torch._foreach_mul_(list(tensors), factor)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target."""
    torch._foreach_copy_(list(targets), list(sources))


def check_finite(gradients: Sequence[Tensor], not_finite: Tensor, inverse_scale: Tensor) -> None:
    """Multiply gradients by `inverse_scale` and set `not_finite` to 1 where one is infinite or NaN; in place."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), not_finite, inverse_scale)


def update_loss_scale(
    scale: Tensor, steps: Tensor, overflow: Tensor, *, growth: float, backoff: float, interval: int
) -> None:
    """Update the loss scale and the steps since an overflow in place, by the rule of torch's GradScaler."""
    torch._amp_update_scale_(scale, steps, overflow, growth, backoff, interval)


def reads_overflow_flag(optimizer: Any) -> bool:
    """Whether an optimizer, being fused, skips its step on the GPU where `found_inf` is set; no wait for the flag."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# What autograd is doing: the node that runs, its number, callbacks at the end of backward, hooks on parameters.
#
# Forward gives every node the next sequence number of its thread, and backward runs the node of the highest number
# first. So numbers taken between two modules say, in backward, which of them a node belongs to, without a hook in
# the graph.


_UNNUMBERED = 1 << 60
"""Nodes that sum gradients up (AccumulateGrad) have the largest number there is."""


def is_in_backward() -> bool:
    """Whether this thread is running backward; False on a torch that cannot say."""
    task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    return task() != -1


def next_sequence_number() -> int:
    """Return the number that the next autograd node of this thread gets; 0 on a torch that cannot say."""
    number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
    return number()


def running_sequence_number() -> int | None:
    """Return the number of the autograd node that runs; None outside of backward, and for nodes without one."""
    node = getattr(torch._C, "_current_autograd_node", lambda: None)()
    number = None if node is None else int(node._sequence_nr())
    return None if number is None or number > _UNNUMBERED else number


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward that runs now ends, after the callbacks that were queued before; as FSDP2 does."""
    required(torch.autograd.Variable, "_execution_engine").queue_callback(callback)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; inference tensors, which keep no count, give 0."""
    return 0 if tensor.is_inference() else tensor._version


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return what tells a storage from all others that are alive, also on meta, where every address is 0."""
    return int(storage._cdata)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a hook was registered on the gradient of a parameter, before or after it is accumulated."""
    return bool(getattr(parameter, "_backward_hooks", None)) or has_accumulation_hooks(parameter)


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether a hook runs when the gradient of a parameter has been accumulated."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def share_gradient_hooks(source: Any, target: Any) -> None:
    """Have `target` show the gradient hooks of `source`: one dict, so hooks added later are in both."""
    target._backward_hooks = source._backward_hooks
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks
