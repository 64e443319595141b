"""What `torch.nn.Module` keeps of its own: registered parameters, buffers and children, and base classes of layers.

`named_parameters()` and its kind list a tied parameter or a repeated child once, and `setattr` runs the hooks of the
user's class. Transforms that replace a parameter wherever it is registered read and write the dicts themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch.nn.modules import batchnorm, conv, dropout

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

BatchNormBase = batchnorm._BatchNorm
"""Base class of torch's batch norms, SyncBatchNorm included."""
NormBase = batchnorm._NormBase
"""Base class of batch norms and instance norms, which keep running statistics."""
ConvolutionBase = conv._ConvNd
"""Base class of convolutions, transposed ones included."""
DropoutBase = dropout._DropoutNd
"""Base class of torch's dropouts."""
REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes in which a module keeps its registered parameters, buffers and children."""
HOOK_ATTRIBUTE_ENDS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
"""Ends of the attributes in which a module keeps its hooks."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of a module's own parameters, tied ones included; writing to it registers without hooks."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of a module's own buffers; writing to it registers without hooks."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of a module's children, repeated ones included; writing to it replaces a child."""
    return module._modules


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called; False on a torch that keeps it elsewhere."""
    return getattr(module, "_compiled_call_impl", None) is not None


def padded_convolution(convolution: Any, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve with other weights than the module's own, padded as the module is; its `forward` calls this too."""
    output: Tensor = convolution._conv_forward(images, weight, bias)
    return output


def transposed_padding(convolution: Any, images: Tensor, output_size: list[int] | None) -> list[int]:
    """Return the output padding by which a transposed convolution reaches `output_size`."""
    sizes = convolution.stride, convolution.padding, convolution.kernel_size
    padding: list[int] = convolution._output_padding(
        images, output_size, *sizes, len(convolution.stride), convolution.dilation
    )
    return padding


def drop_step_hooks(optimizer: Optimizer) -> None:
    """Give a copy of an optimizer hooks of its own, of which it has none; those of the original stay."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
