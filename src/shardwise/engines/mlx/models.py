"""The built-in decoder and residual networks in MLX, with the parameter names and shapes of torch's (extra [mlx])."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardwise.errors import JobError, MissingExtraError, nearest
from shardwise.models.resnet import STEMS, WIDTHS
from shardwise.models.transformer import INIT_STD
from shardwise.plans.catalogue import DecoderConfig, decoder_config, override

try:
    import mlx.core as mx
    from mlx import nn
except ImportError as error:
    raise MissingExtraError.of("shardwise.models.mlx", "mlx") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.models.resnet import Norm, Stem


def decoder(name_or_config: str | DecoderConfig, **overrides: object) -> MlxDecoder:
    """Return a new decoder of a published size or of a config; `overrides` replace fields of the config."""
    if isinstance(name_or_config, DecoderConfig):
        return MlxDecoder(override(name_or_config, **overrides))
    return MlxDecoder(decoder_config(name_or_config, **overrides))


class MlxDecoder(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """Decoder-only transformer: tokens [batch, tokens] to logits [batch, tokens, vocab_size]; no dropout.

    A tied head uses the embedding's weight and has no separate parameter, as in torch.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        if config.family == "gpt2":
            self.positions = nn.Embedding(config.context, config.width)
        self.blocks = [MlxBlock(config) for _ in range(config.num_layers)]
        self.norm = _norm(config)
        if not config.tie_head:
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Initialize matrices as in GPT-2, with mx.random, and biases to zero."""
        residual_std = INIT_STD / (2 * self.config.num_layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = residual_std if name.endswith(("attn.out", "mlp.down")) else INIT_STD
                module.weight = mx.random.normal(module.weight.shape, scale=std)
                if "bias" in module:
                    module.bias = mx.zeros_like(module.bias)

    def __call__(self, tokens: Any) -> Any:
        """Return the logits [batch, tokens, vocab_size] of tokens [batch, tokens]."""
        num_tokens = tokens.shape[1]
        if num_tokens > self.config.context:
            raise JobError(
                f"sequences have {num_tokens} tokens, but the decoder's context length is {self.config.context}",
                code="model.context-exceeded",
                fix=f"use context={num_tokens} or shorter sequences",
            )
        x = self.embed(tokens)
        if self.config.family == "gpt2":
            x = x + self.positions(mx.arange(num_tokens))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.embed.as_linear(x) if self.config.tie_head else self.head(x)


class MlxBlock(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """Pre-norm transformer block: attention and feed-forward, each with a residual connection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attn_norm = _norm(config)
        self.attn = MlxAttention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MlxMlp(config)

    def __call__(self, x: Any) -> Any:
        """Return the block's output for x [batch, tokens, width]."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class MlxAttention(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """Causal attention; the rows of `qkv` are ordered by group: its query heads, its key head, its value head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.queries_per_group = config.num_heads // config.kv_heads
        self.rope_base = config.rope_base if config.family == "llama" else None
        rows = (config.num_heads + 2 * config.kv_heads) * config.head_width
        bias = config.family == "gpt2"
        self.qkv = nn.Linear(config.width, rows, bias=bias)
        self.out = nn.Linear(config.width, config.width, bias=bias)

    def __call__(self, x: Any) -> Any:
        """Return the causal self-attention of x [batch, tokens, width]."""
        batch, num_tokens, _ = x.shape
        groups = self.qkv(x).reshape(batch, num_tokens, -1, self.queries_per_group + 2, self.head_width)
        q = groups[..., :-2, :].reshape(batch, num_tokens, -1, self.head_width)
        q, k, v = (heads.swapaxes(1, 2) for heads in (q, groups[..., -2, :], groups[..., -1, :]))
        if self.rope_base is not None:
            q, k = self._rotate(q), self._rotate(k)
        mixed = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.head_width**-0.5, mask="causal")
        return self.out(mixed.swapaxes(1, 2).reshape(batch, num_tokens, -1))

    def _rotate(self, heads: Any) -> Any:
        """Apply rotary position embeddings to heads [batch, heads, tokens, head_width], in pairs (i, i + half)."""
        return mx.fast.rope(heads, self.head_width, traditional=False, base=self.rope_base, scale=1.0, offset=0)


class MlxMlp(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """Feed-forward layers: down(gelu(up(x))) as in GPT-2, down(silu(gate(x)) * up(x)) as in Llama."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        bias = config.family == "gpt2"
        if config.family == "llama":
            self.gate = nn.Linear(config.width, config.hidden_width, bias=False)
        self.up = nn.Linear(config.width, config.hidden_width, bias=bias)
        self.down = nn.Linear(config.hidden_width, config.width, bias=bias)

    def __call__(self, x: Any) -> Any:
        """Return the output for x [batch, tokens, width], computed for each token independently."""
        up = self.up(x)
        return self.down(nn.silu(self.gate(x)) * up if "gate" in self else nn.gelu_approx(up))


def _norm(config: DecoderConfig) -> Any:
    norm = nn.LayerNorm if config.family == "gpt2" else nn.RMSNorm
    return norm(config.width, eps=config.norm_eps)


# Residual networks of 18, 34 and 50 layers.


NORMS: dict[str, Callable[[int], Any]] = {
    "batch": nn.BatchNorm,
    "group": lambda channels: nn.GroupNorm(math.gcd(32, channels), channels, pytorch_compatible=True),
}


def resnet18(
    *, num_classes: int = 1000, in_channels: int = 3, norm: Norm = "batch", stem: Stem = "imagenet"
) -> MlxResNet:
    """Return a ResNet-18, which has 11,689,512 parameters with the default arguments."""
    return MlxResNet((2, 2, 2, 2), basic, num_classes=num_classes, in_channels=in_channels, norm=norm, stem=stem)


def resnet34(
    *, num_classes: int = 1000, in_channels: int = 3, norm: Norm = "batch", stem: Stem = "imagenet"
) -> MlxResNet:
    """Return a ResNet-34, which has 21,797,672 parameters with the default arguments."""
    return MlxResNet((3, 4, 6, 3), basic, num_classes=num_classes, in_channels=in_channels, norm=norm, stem=stem)


def resnet50(
    *, num_classes: int = 1000, in_channels: int = 3, norm: Norm = "batch", stem: Stem = "imagenet"
) -> MlxResNet:
    """Return a ResNet-50 (v1.5, stride in the 3x3 convolution), which has 25,557,032 parameters by default."""
    return MlxResNet((3, 4, 6, 3), bottleneck, num_classes=num_classes, in_channels=in_channels, norm=norm, stem=stem)


class MlxResNet(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """Residual network: images [batch, channels, height, width], as in torch, to logits [batch, num_classes].

    Internally channels are last, as MLX's layers require. Stem "imagenet" reduces height and width by a factor of 4;
    "small" keeps them, for images of about 8 to 64 pixels.
    """

    def __init__(
        self,
        num_blocks: tuple[int, ...],
        body: Callable[[int, int], Sequence[tuple[int, int, int]]],
        *,
        num_classes: int,
        in_channels: int,
        norm: str,
        stem: str,
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise JobError(f"resnet norm {norm!r} is unknown", code="model.unknown-norm", fix=nearest(str(norm), NORMS))
        if stem not in STEMS:
            raise JobError(f"resnet stem {stem!r} is unknown", code="model.unknown-stem", fix=nearest(str(stem), STEMS))
        size, stride = (3, 1) if stem == "small" else (7, 2)
        self.stem = Projection(in_channels, WIDTHS[0], size, stride, norm)
        self.pool = None if stem == "small" else nn.MaxPool2d(3, stride=2, padding=1)
        self.stages: list[list[MlxResidual]] = []
        channels = WIDTHS[0]
        for width, count in zip(WIDTHS, num_blocks, strict=True):
            stage = []
            for index in range(count):
                stride = 2 if index == 0 and width > WIDTHS[0] else 1
                stage.append(MlxResidual(channels, body(width, stride), norm))
                channels = stage[-1].out_channels
            self.stages.append(stage)
        self.head = nn.Linear(channels, num_classes)
        self._init_weights()

    def _init_weights(self) -> None:
        """Initialize convolutions with mx.random and each block as the identity; norms and head keep their defaults."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                out_channels, height, width, _ = module.weight.shape
                std = math.sqrt(2 / (out_channels * height * width))  # Kaiming initialization with fan_out
                module.weight = mx.random.normal(module.weight.shape, scale=std)
            elif isinstance(module, MlxResidual):
                module.init_as_identity()

    def __call__(self, images: Any) -> Any:
        """Return the logits [batch, num_classes] of images [batch, channels, height, width]."""
        x = nn.relu(self.stem(images.transpose(0, 2, 3, 1)))
        if self.pool is not None:
            x = self.pool(x)
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.head(x.mean(axis=(1, 2)))


class MlxResidual(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """Residual block relu(body(x) + shortcut(x)); the shortcut is a projection if the shape changes."""

    def __init__(self, channels: int, parts: Sequence[tuple[int, int, int]], norm: str) -> None:
        """`parts` are the output channels, kernel size and stride of the body's convolutions."""
        super().__init__()
        self.out_channels = parts[-1][0]
        stride = math.prod(part[2] for part in parts)
        self.body = Body(channels, parts, norm)
        if stride > 1 or channels != self.out_channels:
            self.shortcut = Projection(channels, self.out_channels, 1, stride, norm)

    def init_as_identity(self) -> None:
        """Set the weight of the body's last norm to zero, so that the block starts as its shortcut."""
        last = self.body.last_norm
        last.weight = mx.zeros_like(last.weight)

    def __call__(self, x: Any) -> Any:
        """Return the block's output [batch, height, width, channels]; the stride divides height and width."""
        return nn.relu(self.body(x) + (self.shortcut(x) if "shortcut" in self else x))


class Body(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """Convolutions conv1, conv2, ..., each followed by its norm, with relu between them."""

    def __init__(self, channels: int, parts: Sequence[tuple[int, int, int]], norm: str) -> None:
        super().__init__()
        self.count = len(parts)
        for number, (out_channels, size, stride) in enumerate(parts, start=1):
            self[f"conv{number}"] = _conv(channels, out_channels, size, stride)
            self[f"norm{number}"] = NORMS[norm](out_channels)
            channels = out_channels

    @property
    def last_norm(self) -> Any:
        """The norm of the last convolution."""
        return self[f"norm{self.count}"]

    def __call__(self, x: Any) -> Any:
        """Return the output for x [batch, height, width, channels], without a final relu."""
        for number in range(1, self.count + 1):
            x = self[f"norm{number}"](self[f"conv{number}"](x))
            if number < self.count:
                x = nn.relu(x)
        return x


class Projection(nn.Module):  # type: ignore[misc]  # mlx is not followed
    """A convolution followed by its norm."""

    def __init__(self, channels: int, out_channels: int, size: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv = _conv(channels, out_channels, size, stride)
        self.norm = NORMS[norm](out_channels)

    def __call__(self, x: Any) -> Any:
        """Return the output for x [batch, height, width, channels]."""
        return self.norm(self.conv(x))


def basic(width: int, stride: int) -> Sequence[tuple[int, int, int]]:
    """Return the two 3x3 convolutions of a basic block with `width` output channels."""
    return (width, 3, stride), (width, 3, 1)


def bottleneck(width: int, stride: int) -> Sequence[tuple[int, int, int]]:
    """Return the 1x1, 3x3 and 1x1 convolutions of a bottleneck block with 4 * `width` output channels."""
    return (width, 1, 1), (width, 3, stride), (4 * width, 1, 1)


def _conv(channels: int, out_channels: int, size: int, stride: int) -> Any:
    return nn.Conv2d(channels, out_channels, size, stride, padding=size // 2, bias=False)
