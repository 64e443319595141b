"""torch's own transformer layers under tensor parallelism: they read the parameters of modules inside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable


def lend_parameters(module: nn.Module, plain: Callable[[Tensor | None], Tensor | None]) -> None:
    """Let torch's attention layers in `module` find plain parameters in their projection, made by `plain` at each call.

    Encoder layers lose their fused inference kernel, which reads the parameters of all modules inside.
    """
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoderLayer):
            child.activation_relu_or_gelu = 0  # what the layer takes for "neither", and so for "not fused"
        if isinstance(child, nn.MultiheadAttention):
            child.forward = _with_plain(child.out_proj, child.forward, plain)  # type: ignore[method-assign]


def _with_plain(
    projection: nn.Module, inner: Callable[..., Any], plain: Callable[[Tensor | None], Tensor | None]
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(projection._parameters)  # noqa: SLF001 - what the attention reads as out_proj.weight
        for kind, parameter in own.items():
            projection._parameters[kind] = plain(parameter)  # type: ignore[assignment]  # noqa: SLF001
        try:
            return inner(*args, **kwargs)
        finally:
            projection._parameters.update(own)  # noqa: SLF001

    return forward
