"""Batch norm that is exact with data parallelism, and bf16 convolutions that CPUs compute in fp32."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as torch's documentation names it
from torch import Tensor, nn
from torch.nn import functional

from shardwise.errors import JobError
from shardwise.parallel.stage_gate import nan_placeholder
from shardwise.torch_private.dispatch import BatchNormBase, own_modules, padded_convolution, transposed_padding

if TYPE_CHECKING:
    from collections.abc import Iterable


_CHUNK = 1 << 22
"""Elements of an input that are cast to the dtype of the statistics at once: 16 MiB in fp32.

Casts of the whole input were at the peak of a bf16 ResNet-18 in steps with padding rows, which took 19 % more memory
than predicted (H200).
"""


class BatchNorm(BatchNormBase):
    """Batch norm with statistics over the unpadded rows of all ranks in `group`, or of this rank if `group` is None.

    torch's SyncBatchNorm rejects CPU modules and includes padding rows in its statistics. This class supports CPU
    modules and excludes padding rows.
    """

    group: dist.ProcessGroup | None = None
    name: str = "a batch norm"
    rows: tuple[int, int] | None = None
    """Numbers of rows of the next input as (without padding, with padding); the padding rows are the last rows.

    None if the input is not padded. Set before forward.
    """
    tracks: bool = True
    """Whether to update the running statistics; False while a forward pass is recomputed."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - the name is torch's
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input, got {input.dim()}D")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        """Normalize the input; in training, communicates over `group`."""
        self._check_input_dim(input)
        if not self.training:
            return self._by_torch(input)
        rows = filled = input.shape[0]
        if self.rows is not None:
            rows, filled = self.rows
        if input.shape[0] != filled:
            raise JobError(
                f"{self.name} expected {filled} rows, the size of the padded micro-batch, got {input.shape[0]}",
                code="support.batch-norm-filled-rows",
                fix="set a batch_size that divides the dataset size, or use GroupNorm or LayerNorm",
            )
        if self.group is None and rows == filled:
            return self._by_torch(input)
        output, mean, var, count = _SharedNorm.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, rows, self.group
        )
        if self.tracks:
            self._track(mean, var, count)
        return output  # type: ignore[no-any-return]

    def _by_torch(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        """Normalize with torch's kernel, with weight and bias cast to the dtype of the running statistics.

        CUDA kernels require the same dtype for both. FSDP2 casts weights to the compute dtype, but not buffers.
        """
        running = self.running_mean
        if running is None or self.weight is None or self.weight.dtype == running.dtype:
            return super().forward(input)
        momentum = self.momentum or 0.0
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        return functional.batch_norm(
            input,
            running,
            self.running_var,
            self.weight.to(running.dtype),
            self.bias.to(running.dtype),
            self.training,
            momentum,
            self.eps,
        )

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Update the running statistics unless all ranks have only padding; the variance is unbiased, as in torch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        seen = count > 0
        self.num_batches_tracked.add_(seen.squeeze().to(torch.int64))
        weight = 1.0 / self.num_batches_tracked.clamp(min=1) if self.momentum is None else self.momentum
        moved = seen.to(self.running_mean.dtype) * weight
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), moved)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), moved)


class _SharedNorm(torch.autograd.Function):
    """Normalizes over the unpadded rows of all ranks, with an all-gather in forward and an all-reduce in backward."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions accept no keyword arguments
        ctx: Any, value: Tensor, weight: Tensor, bias: Tensor, eps: float, rows: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _statistics(value[:rows], group)
        # FSDP2 may cast weights to a lower precision than the statistics, but the operator requires one dtype.
        scale, shift = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
        output = functional.batch_norm(value, mean, var, scale, shift, training=False, eps=eps)
        ctx.save_for_backward(value, weight, mean, torch.rsqrt(var + eps), count)
        ctx.rows, ctx.group = rows, group
        ctx.mark_non_differentiable(mean, var, count)
        return output, mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        value, weight, mean, inv_std, count = ctx.saved_tensors
        over, shape = _reduced(value), _broadcast(value)
        chunks = list(zip(_chunks(value[: ctx.rows]), _chunks(grad[: ctx.rows]), strict=True))
        grad_sum, grad_centred = torch.zeros_like(mean), torch.zeros_like(mean)
        for real, grad_real in chunks:
            wide = grad_real.to(mean.dtype)
            grad_sum += wide.sum(over)
            grad_centred += (wide * (real - mean.view(shape))).sum(over)
        grad_weight, grad_bias = grad_centred * inv_std, grad_sum  # this rank's contribution: the gradient sync sums it
        if ctx.group is not None:
            both = torch.stack([grad_sum, grad_centred])
            dist.all_reduce(both, group=ctx.group)
            grad_sum, grad_centred = both[0], both[1]
        count = count.clamp(min=1)
        scale = inv_std if weight is None else inv_std * weight
        slope, offset = inv_std.square() * grad_centred / count, grad_sum / count
        grad_value = torch.zeros_like(value)  # padding rows get zero gradient
        for (real, grad_real), target in zip(chunks, _chunks(grad_value[: ctx.rows]), strict=True):
            centred = real - mean.view(shape)
            target.copy_(scale.view(shape) * (grad_real - offset.view(shape) - centred * slope.view(shape)))
        if weight is None:
            return grad_value, None, None, None, None, None
        return grad_value, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None, None


def _statistics(real: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and count of each channel over all ranks; communicates over `group`.

    Each rank contributes the mean and variance of its rows. Chan's formula combines them without cancellation of large
    sums.
    """
    dtype = torch.float64 if real.dtype == torch.float64 else torch.float32
    counts, means, variances = [], [], []
    for chunk in _chunks(real):
        if chunk.shape[0]:
            var, mean = torch.var_mean(chunk.to(dtype), _reduced(real), correction=0)
        else:
            mean = var = torch.zeros(real.shape[1], dtype=dtype, device=real.device)
        counts.append(real.new_tensor([chunk.numel() // real.shape[1]], dtype=dtype))
        means.append(mean)
        variances.append(var)
    count, mean, var = counts[0], means[0], variances[0]
    if len(counts) > 1:
        count, mean, var = _combined(torch.stack(counts), torch.stack(means), torch.stack(variances))
    if group is None:
        return mean, var, count
    packed = torch.cat([mean, var, count])
    gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, packed, group=group)
    means_of_ranks, variances_of_ranks, counts_of_ranks = torch.stack(gathered).split([len(mean), len(var), 1], dim=1)
    total, mean, var = _combined(counts_of_ranks, means_of_ranks, variances_of_ranks)
    return mean, var, total


def _combined(counts: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance of several sets of rows from those of each, one per row of the tensors."""
    total = counts.sum(0)
    divisor = total.clamp(min=1)  # a micro-batch may have only padding on all ranks
    mean = (counts * means).sum(0) / divisor
    var = (counts * (variances + (means - mean).square())).sum(0) / divisor
    return total, mean, var


def _chunks(value: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of a tensor in views of at most _CHUNK elements, or of one row."""
    rows = max(1, _CHUNK // max(1, math.prod(value.shape[1:])))
    chunks: tuple[Tensor, ...] = value.split(rows)
    return chunks


def _reduced(value: Tensor) -> list[int]:
    return [0, *range(2, value.ndim)]


def _broadcast(value: Tensor) -> list[int]:
    return [1, -1, *([1] * (value.ndim - 2))]


_REGISTERED = {"_parameters", "_buffers", "_modules"}
_TORCHS_OWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def replace_batch_norms(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Replace every torch batch norm with a `BatchNorm` that has the same parameters, buffers and names.

    Subclasses of torch's classes may define their own forward and are not replaced; see `foreign_batch_norms`.
    """
    replaced: dict[int, BatchNorm] = {}  # a norm may be registered in several places
    for prefix, parent in list(module.named_modules()):
        for name, child in own_modules(parent).items():
            # In a pipeline, norms of other stages are placeholders, or layers without parameters: not replaced.
            is_away = vars(child).get("forward") is nan_placeholder or "weight" in vars(child)
            if type(child) in _TORCHS_OWN and not is_away:
                path = f"{prefix}.{name}" if prefix else name
                own_modules(parent)[name] = replaced.setdefault(id(child), _like(child, group, path))
    return _like(module, group, "the model") if type(module) in _TORCHS_OWN else module


def foreign_batch_norms(module: nn.Module) -> list[str]:
    """Return the names of custom batch norms, whose statistics would include padding rows."""
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, BatchNormBase) and not isinstance(child, BatchNorm) and type(child) not in _TORCHS_OWN
    ]


def _like(norm: Any, group: dist.ProcessGroup | None, name: str) -> BatchNorm:
    ours = BatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    # Hooks and attributes that the user set are copied.
    vars(ours).update({key: value for key, value in vars(norm).items() if key not in _REGISTERED})
    ours.weight, ours.bias = norm.weight, norm.bias
    ours.running_mean, ours.running_var = norm.running_mean, norm.running_var
    ours.num_batches_tracked = norm.num_batches_tracked
    ours.train(norm.training)
    ours.group, ours.name = group, name
    return ours


def batch_norms(module: nn.Module) -> Iterable[BatchNorm]:
    """Return all `BatchNorm` modules inside `module`."""
    return [child for child in module.modules() if isinstance(child, BatchNorm)]


# Strided convolutions of narrow inputs, which CPUs compute in fp32 if the plan computes in bf16.
#
# torch 2.13 on CPUs with AVX512-BF16 does not write all of a bf16 convolution's weight gradient if the input is
# narrower than the stride and the kernel is wider than 1. An example is a 3x3 convolution of stride 2 on 1x1 maps, as
# in the last stages of a ResNet on small images. The optimizer then reads uninitialized memory, which sometimes
# contains NaN. The same is true of a transposed convolution whose output is narrower than its stride. The output and
# the input gradient are correct, and all three are correct in fp16 and fp32. Only narrow widths are known to fail;
# heights are guarded too.


_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FUNCTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def guard_narrow_convolutions(module: nn.Module) -> None:
    """Make strided convolutions in `module` compute in fp32 if their input or output is narrower than the stride."""
    for child in module.modules():
        if not isinstance(child, (*_PLAIN, *_TRANSPOSED)) or max(child.stride) == 1:
            continue
        if type(child).forward in {kind.forward for kind in _PLAIN}:
            child.forward = partial(_plain, child, child.forward)  # type: ignore[method-assign]
        elif type(child).forward in {kind.forward for kind in _TRANSPOSED}:
            child.forward = partial(_transposed, child, child.forward)  # type: ignore[method-assign]


def _plain(convolution: Any, forward: Any, images: Tensor) -> Tensor:
    strides = convolution.stride
    if not (_is_in_bf16(images) and _is_narrow(images.shape[-len(strides) :], strides)):
        result: Tensor = forward(images)
        return result
    with torch.autocast("cpu", enabled=False):
        out = padded_convolution(convolution, images.float(), *_parameters(convolution))
    return out.to(torch.bfloat16)


def _transposed(convolution: Any, forward: Any, images: Tensor, output_size: list[int] | None = None) -> Tensor:
    strides, dims = convolution.stride, len(convolution.stride)
    padding = transposed_padding(convolution, images, output_size)
    sides = []
    for dim, side in enumerate(images.shape[-dims:]):
        kernel = convolution.dilation[dim] * (convolution.kernel_size[dim] - 1) + 1
        sides.append((side - 1) * strides[dim] - 2 * convolution.padding[dim] + kernel + padding[dim])
    if not (_is_in_bf16(images) and _is_narrow(sides, strides)):
        result: Tensor = forward(images, output_size)
        return result
    settings = (strides, convolution.padding, padding, convolution.groups, convolution.dilation)
    with torch.autocast("cpu", enabled=False):
        out: Tensor = _FUNCTIONS[dims - 1](images.float(), *_parameters(convolution), *settings)
    return out.to(torch.bfloat16)


def _is_in_bf16(images: Tensor) -> bool:
    """Return whether a convolution of `images` would compute in bf16, by autocast or by its dtype."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16
    return images.dtype == torch.bfloat16


def _is_narrow(sides: Any, strides: tuple[int, ...]) -> bool:
    return any(side < stride for side, stride in zip(sides, strides, strict=True))


def _parameters(convolution: Any) -> tuple[Tensor, Tensor | None]:
    bias = convolution.bias
    return convolution.weight.float(), None if bias is None else bias.float()
