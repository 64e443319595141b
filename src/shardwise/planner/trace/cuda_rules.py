"""CUDA's rules for meta tensors: the dtypes of autocast, fused kernels, and the workspaces of cuDNN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own custom
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.torch_private.dispatch import autocasts_on_cuda, efficient_attention, flash_attention, function_modes

if TYPE_CHECKING:
    from collections.abc import Callable


# ruff: noqa: FBT001, FBT002, PLR0917 - torch's own signatures and operators


# From the operators with a kernel for AutocastCUDA in torch 2.13 (`autocasts_on_cuda`).
_LOWERED = frozenset({
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "addr",
    "chain_matmul", "multi_dot", "einsum", "prelu", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "vecdot",
})  # fmt: skip
_LIFTED = frozenset({
    "layer_norm", "group_norm", "pow", "__pow__", "exp", "expm1", "log", "log10", "log2", "log1p", "rsqrt",
    "reciprocal", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "softplus", "norm", "vector_norm", "matrix_norm",
    "cosine_similarity", "logsumexp", "cumprod", "cumsum", "prod", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
    "huber_loss", "kl_div", "binary_cross_entropy_with_logits", "poisson_nll_loss", "cdist", "dist", "softmax",
    "log_softmax", "interpolate",
})  # fmt: skip


class CudaRules(TorchFunctionMode):
    """Applies CUDA's autocast to meta tensors and calls the kernels that CUDA tensors would get.

    `compute` is autocast's dtype, None for no autocast. torch's own autocast acts on CUDA tensors only, which a torch
    built without CUDA does not have.
    """

    def __init__(self, compute: torch.dtype | None) -> None:
        super().__init__()
        self._compute = compute
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        """Casts of weights to the compute dtype, one each, as in autocast's cache."""
        self.lowered: set[int] = set()
        """Ids of the weights that were cast."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function with its operands cast, fused where CUDA has a kernel for it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._compute is not None:
            if name in _LOWERED:
                args, kwargs = self._cast((args, kwargs), self._compute)
            elif name in _LIFTED or (name == "rms_norm" and _lifts_rms_norm()):
                args, kwargs = self._cast((args, kwargs), torch.float32)
            elif name in {"cross_entropy", "cross_entropy_loss"}:
                return _cross_entropy(*args, **kwargs)
        fused = _FUSED.get(name)
        return func(*args, **kwargs) if fused is None else fused(func, *args, **kwargs)

    def forget_casts(self) -> None:
        """Drop the cached copies of weights, as the end of autocast does."""
        self._casts.clear()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` wrapped so that these rules also apply in backward, which disables function modes."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self in function_modes():
                return function(*args, **kwargs)
            with self:
                result = function(*args, **kwargs)
            self.forget_casts()
            return result

        return run

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return self._cast_tensor(value, dtype)
        if isinstance(value, tuple | list):
            return type(value)(self._cast(item, dtype) for item in value)
        if isinstance(value, dict):
            return {key: self._cast(item, dtype) for key, item in value.items()}
        return value

    def _cast_tensor(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype in {dtype, torch.float64}:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad and dtype != torch.float32):
            if tensor.is_leaf and dtype != torch.float32:
                self.lowered.add(id(tensor))  # frozen: autocast casts it again for each use
            return tensor.to(dtype)
        if id(tensor) not in self._casts:
            lower = tensor.to(dtype)
            self._casts[id(tensor)] = (tensor, lower)
            self.lowered.add(id(tensor))
        return self._casts[id(tensor)][1]


def _lifts_rms_norm() -> bool:
    """Whether autocast runs rms_norm in fp32, as torch does since 2.12."""
    return autocasts_on_cuda("aten::rms_norm")


class _RmsNorm(torch.autograd.Function):
    """A fused kernel that saves its input and one statistic per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-num_dims]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


class _Dropout(torch.autograd.Function):
    """A fused kernel that saves a mask of one byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return torch.empty_like(mask, dtype=gradients[0].dtype)


class _GroupedProduct(torch.autograd.Function):
    """Products of groups of rows with one matrix each, as of experts: the work of one product of all rows.

    The groups' sizes are values, which meta tensors lack, and the sum of the work does not depend on them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_x = torch.mm(gradients[0], weight[0].t()) if needs_x else None
        return grad_x, torch.empty_like(weight) if needs_weight else None


def _grouped_mm(func: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the grouped product of rows with a stack of matrices; its meta kernel accepts bf16 only."""
    if not weight.is_meta or x.ndim != 2 or weight.ndim != 3:
        return func(x, weight, *args, **kwargs)
    return _GroupedProduct.apply(x.to("meta"), weight)  # type: ignore[no-untyped-call]


def _rms_norm(_: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:  # noqa: ARG001 - torch's signature
    return _RmsNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]


def _dropout(func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return _Dropout.apply(x) if training and p > 0 else func(x, p, training=False, inplace=inplace)  # type: ignore[no-untyped-call]


def _attention(
    func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Call the kernel that CUDA would: flash for 16 bits without a mask, else memory-efficient, else the math one."""
    is_equal = query.shape[-1] == value.shape[-1]  # flash attention requires heads of one width
    if query.dtype in {torch.bfloat16, torch.float16} and attn_mask is None and is_equal:
        return flash_attention(query, key, value, dropout=dropout_p, is_causal=is_causal, scale=scale)
    if query.dtype == torch.float64 or (enable_gqa and query.shape[1] != key.shape[1]):
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return efficient_attention(query, key, value, bias=attn_mask, dropout=dropout_p, is_causal=is_causal, scale=scale)


def _cross_entropy(logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute cross entropy from an fp32 copy of the logits, as under autocast."""
    return F.cross_entropy(logits.float(), target, *args, **kwargs)


_FUSED: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
    "grouped_mm": _grouped_mm,
    "_grouped_mm": _grouped_mm,
}


# Workspaces that cuDNN allocates in torch's allocator during convolutions: copies of operands in its kernels' layout.


_PADDED = 8
"""cuDNN pads 16-bit inputs to at least this many channels."""
_ALIGNED = 16
"""A 1x1 convolution needs no copy if the bytes of one channel are a multiple of this."""


def workspace_bytes(name: str, args: Any) -> float:
    """Return the workspace of an operator with these operands on a GPU; 0 for all but convolutions.

    Measured with torch 2.11 on an H200 over 60 convolutions of ResNets, within 10 MB: input and output once each, for
    gradients also the weights; none for 1x1 kernels, nor for tensors that are channels-last already.
    """
    if name == "aten::convolution":
        value, weight = args[0], args[1]
        return _copies(value, weight, strides=args[3], backward=False)
    if name == "aten::convolution_backward":
        value, weight = args[1], args[2]
        return _copies(value, weight, strides=args[4], backward=True)
    return 0.0


def _copies(value: Tensor, weight: Tensor, *, strides: list[int], backward: bool) -> float:
    if value.ndim != 4 or _channels_last(value):
        return 0.0
    window, pixels = weight[0, 0].numel(), value[0, 0].numel()
    is_product = window == 1 and (pixels * value.element_size()) % _ALIGNED == 0
    if is_product and not (backward and max(strides) > 1):
        return 0.0
    rows, channels = value.shape[:2]
    if value.element_size() == 2:
        channels = max(channels, _PADDED)
    outputs = rows * weight.shape[0] * pixels / (strides[0] * strides[-1])
    copies = rows * channels * pixels + outputs + (weight.numel() if backward else 0)
    return float(copies * value.element_size())


def _channels_last(value: Tensor) -> bool:
    return value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()
