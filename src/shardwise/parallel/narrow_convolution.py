"""Strided convolutions of narrow inputs, which compute in fp32 on a CPU where the plan computes in bf16.

torch 2.13 on CPUs with AVX512-BF16 leaves parts of a bf16 convolution's weight gradient unwritten where the input is
narrower than the stride and the kernel wider than 1: a 3x3 convolution of stride 2 on 1x1 maps, as the last stages of a
ResNet see them on small images. The optimizer then reads whatever was in that memory, NaN now and then. The same holds
for a transposed convolution whose output is narrower than its stride. Output and input gradient are right, and so are
all three in fp16 and fp32. Widths are at fault, heights were never seen to be; both are guarded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documentation names it
from torch import Tensor, nn

_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FUNCTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def guard_narrow_convolutions(module: nn.Module) -> None:
    """Have torch's own strided convolutions in `module` compute in fp32 where what they read or write is narrow."""
    for part in module.modules():
        if not isinstance(part, (*_PLAIN, *_TRANSPOSED)) or max(part.stride) == 1:
            continue
        if type(part).forward in {kind.forward for kind in _PLAIN}:
            part.forward = partial(_plain, part, part.forward)  # type: ignore[method-assign]
        elif type(part).forward in {kind.forward for kind in _TRANSPOSED}:
            part.forward = partial(_transposed, part, part.forward)  # type: ignore[method-assign]


def _plain(convolution: Any, forward: Any, images: Tensor) -> Tensor:
    strides = convolution.stride
    if not (_is_in_bf16(images) and _is_narrow(images.shape[-len(strides) :], strides)):
        result: Tensor = forward(images)
        return result
    with torch.autocast("cpu", enabled=False):
        # The method that forward calls too: it pads as the module is told to.
        out: Tensor = convolution._conv_forward(images.float(), *_parameters(convolution))  # noqa: SLF001
    return out.to(torch.bfloat16)


def _transposed(convolution: Any, forward: Any, images: Tensor, output_size: list[int] | None = None) -> Tensor:
    strides, dims = convolution.stride, len(convolution.stride)
    padding = convolution._output_padding(  # noqa: SLF001 - forward's own arithmetic for an output of a given size
        images, output_size, strides, convolution.padding, convolution.kernel_size, dims, convolution.dilation
    )
    sides = [
        (side - 1) * stride - 2 * inner + dilation * (kernel - 1) + outer + 1
        for side, stride, inner, dilation, kernel, outer in zip(
            images.shape[-dims:],
            strides,
            convolution.padding,
            convolution.dilation,
            convolution.kernel_size,
            padding,
            strict=True,
        )
    ]
    if not (_is_in_bf16(images) and _is_narrow(sides, strides)):
        result: Tensor = forward(images, output_size)
        return result
    settings = (strides, convolution.padding, padding, convolution.groups, convolution.dilation)
    with torch.autocast("cpu", enabled=False):
        out: Tensor = _FUNCTIONS[dims - 1](images.float(), *_parameters(convolution), *settings)
    return out.to(torch.bfloat16)


def _is_in_bf16(images: Tensor) -> bool:
    """Whether a convolution of `images` computes in bf16 here: by autocast, or as they are."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else images.dtype
    return dtype == torch.bfloat16


def _is_narrow(sides: Any, strides: tuple[int, ...]) -> bool:
    return any(side < stride for side, stride in zip(sides, strides, strict=True))


def _parameters(convolution: Any) -> tuple[Tensor, Tensor | None]:
    bias = convolution.bias
    return convolution.weight.float(), None if bias is None else bias.float()
