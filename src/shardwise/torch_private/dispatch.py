"""Private APIs of autograd, operators and modules: dispatch modes, pytrees, hooks and registered parameters.

`TorchDispatchMode` is torch's documented way to intercept every operator, and the pytree functions are its way to
traverse nested outputs. Both are in private modules of torch 2.11 and 2.13, and are re-exported here.

`named_parameters()` and similar methods list a tied parameter or a repeated child only once, and `setattr` runs hooks
of the user's class. Therefore transforms that replace a parameter everywhere access the dicts of the module.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules import batchnorm, conv, dropout
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch, _pytree

from shardwise.torch_private.distributed import required

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Base class of modes that intercept every operator below autograd."""
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
"""Whether a tensor is a traceable wrapper of other tensors, such as a DTensor."""
is_traceable_wrapper_subclass_type = _python_dispatch.is_traceable_wrapper_subclass_type
"""Whether a class is a traceable wrapper subclass."""
tree_leaves = _pytree.tree_leaves
"""Return the leaves of nested lists, tuples and dicts."""
tree_map = _pytree.tree_map
"""Apply a function to every leaf of a nested value."""
tree_map_only = _pytree.tree_map_only
"""Apply a function to the leaves of a given type."""
tree_flatten = _pytree.tree_flatten
"""Return the leaves and the tree spec of a nested value."""
tree_unflatten = _pytree.tree_unflatten
"""Rebuild a nested value from its leaves and tree spec."""
register_pytree_node = _pytree.register_pytree_node
"""Register a class as a pytree node, so that DDP and FSDP2 find the tensors in its instances."""


def function_modes() -> list[Any]:
    """Return the `TorchFunctionMode`s that are active in this thread."""
    return list(_get_current_function_mode_stack())


def schema_of(operator: Any) -> Any:
    """Return the schema of a dispatched operator, with `name`, `arguments`, `returns` and `is_mutable`."""
    return operator._schema


def autocasts_on_cuda(operator: str) -> bool:
    """Whether autocast has a rule for an operator on CUDA, such as for "aten::rms_norm" since torch 2.12."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, "AutocastCUDA"))


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float, is_causal: bool, scale: float | None
) -> Any:
    """Return the output of the CUDA flash attention kernel, also for meta tensors."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    return operator(query, key, value, dropout, is_causal, scale=scale)[0]


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, dropout: float, is_causal: bool,
    scale: float | None,
) -> Any:  # fmt: skip
    """Return the output of the CUDA memory-efficient attention kernel, which also saves tensors for backward."""
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    return operator(query, key, value, bias, True, dropout, is_causal, scale=scale)[0]  # noqa: FBT003 - torch's order


# Foreach kernels, which process many tensors in a single launch. torch's gradient clipping and GradScaler use them.


def has_scaled_product() -> bool:
    """Whether this version of torch has a product of float8 matrices."""
    return hasattr(torch, "_scaled_mm")


def scaled_product(a: Tensor, b: Tensor, *, is_fast: bool) -> Any:
    """Return the bf16 product of two float8 matrices with scales of 1; `b` is column-major.

    `is_fast` accumulates in fewer bits, as training does in forward. Raises RuntimeError without a kernel for it.
    """
    product = required(torch, "_scaled_mm")
    one = torch.ones((), device=a.device)
    return product(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=is_fast)


def norms_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor; of bf16 tensors in fp32, whose sum of squares needs more than 8 bits."""
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        return torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
    return torch._foreach_norm(list(tensors))


def maxima_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of each tensor, in one tensor."""
    return torch.stack(torch._foreach_norm(list(tensors), torch.inf))


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every tensor in place by `factor`, a scalar tensor on their device."""
    torch._foreach_mul_(list(tensors), factor)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source tensor into its target in place."""
    torch._foreach_copy_(list(targets), list(sources))


def free_matmul_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each stream, 32 MiB on an H200; the next matrix product allocates anew.

    Without the private function they stay allocated.
    """
    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        free()


def add_to_all(tensors: Sequence[Tensor], number: Tensor) -> None:
    """Add `number`, a scalar tensor on their device, to every tensor in place; does not synchronize with the device."""
    torch._foreach_add_(list(tensors), [number] * len(tensors))


def check_finite(gradients: Sequence[Tensor], not_finite: Tensor, inverse_scale: Tensor) -> None:
    """Multiply gradients by `inverse_scale` in place, and set `not_finite` to 1 if one of them is infinite or NaN."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), not_finite, inverse_scale)


def update_loss_scale(
    scale: Tensor, steps: Tensor, overflow: Tensor, *, growth: float, backoff: float, interval: int
) -> None:
    """Update the loss scale and the number of steps since an overflow in place, as torch's GradScaler does."""
    torch._amp_update_scale_(scale, steps, overflow, growth, backoff, interval)


def reads_overflow_flag(optimizer: Any) -> bool:
    """Whether an optimizer is fused and skips its step on the GPU if `found_inf` is set, without a synchronization."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# State of autograd: the running node, its sequence number, callbacks after backward, and hooks of parameters.
#
# Forward assigns increasing sequence numbers to the nodes of a thread, and backward runs the node with the highest
# number first. So the numbers recorded between two modules in forward determine to which module a node belongs in
# backward, without a hook in the graph.


_UNNUMBERED = 1 << 60
"""Lower bound of the sequence numbers of AccumulateGrad nodes, which have the largest possible number."""


def is_in_backward() -> bool:
    """Whether this thread is running backward; False if torch lacks the private API."""
    task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    return task() != -1


def next_sequence_number() -> int:
    """Return the sequence number of the next autograd node of this thread; 0 if torch lacks the private API."""
    number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
    return number()


def running_sequence_number() -> int | None:
    """Return the sequence number of the running autograd node; None outside backward and for AccumulateGrad."""
    node = getattr(torch._C, "_current_autograd_node", lambda: None)()
    number = None if node is None else int(node._sequence_nr())
    return None if number is None or number > _UNNUMBERED else number


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward, after callbacks that were queued earlier, as FSDP2 does."""
    required(torch.autograd.Variable, "_execution_engine").queue_callback(callback)


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return an id that is unique among live storages, also on the meta device, where all data pointers are 0."""
    return int(storage._cdata)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has gradient hooks that run before or after accumulation."""
    return bool(getattr(parameter, "_backward_hooks", None)) or has_accumulation_hooks(parameter)


def has_output_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that receive its output or the gradient of its output."""
    names = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in names)


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has hooks that run after its gradient was accumulated."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def share_gradient_hooks(source: Any, target: Any) -> None:
    """Share the dicts of gradient hooks of `source` with `target`, so that hooks added later are in both."""
    target._backward_hooks = source._backward_hooks
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


BatchNormBase = batchnorm._BatchNorm
"""Base class of torch's batch norms, including SyncBatchNorm."""
NormBase = batchnorm._NormBase
"""Base class of batch norms and instance norms, which have running statistics."""
ConvolutionBase = conv._ConvNd
"""Base class of convolutions, including transposed convolutions."""
DropoutBase = dropout._DropoutNd
"""Base class of torch's dropout modules."""
REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes in which a module stores its registered parameters, buffers and children."""
HOOK_ATTRIBUTE_ENDS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
"""Suffixes of the attributes in which a module stores its hooks."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the mutable dict of a module's direct parameters, including tied ones; writes bypass `__setattr__`."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the mutable dict of a module's direct buffers; writes bypass `__setattr__`."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the mutable dict of a module's children, including repeated ones; a write replaces a child."""
    return module._modules


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called; False if torch lacks the private attribute."""
    return getattr(module, "_compiled_call_impl", None) is not None


def padded_convolution(convolution: Any, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve with the given weight and bias and the module's padding, as the `forward` of the module does."""
    output: Tensor = convolution._conv_forward(images, weight, bias)
    return output


def transposed_padding(convolution: Any, images: Tensor, output_size: list[int] | None) -> list[int]:
    """Return the output padding that makes a transposed convolution produce `output_size`."""
    sizes = convolution.stride, convolution.padding, convolution.kernel_size
    padding: list[int] = convolution._output_padding(
        images, output_size, *sizes, len(convolution.stride), convolution.dilation
    )
    return padding


def drop_step_hooks(optimizer: Optimizer) -> None:
    """Remove the step hooks of a copied optimizer, without removing those of the original."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def take_step_hooks(optimizer: Optimizer, source: Optimizer) -> None:
    """Share the step hooks of `source` with an optimizer that takes its place."""
    optimizer._optimizer_step_pre_hooks = source._optimizer_step_pre_hooks
    optimizer._optimizer_step_post_hooks = source._optimizer_step_post_hooks
