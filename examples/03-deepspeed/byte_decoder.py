"""What the scripts of this chapter share: a small decoder, text to train it on, and DeepSpeed made ready."""

import os
import sysconfig
import warnings
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

LENGTH = 64
"""Bytes the decoder sees."""
HEAD_WIDTH = 16


class Attention(nn.Module):
    """Causal attention, [N, T, width] to itself; counts its heads in the tensors, so that ranks may share them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x mixed over the bytes before each."""
        parts = (part(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return self.out(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two Linears, [N, T, width] to [N, T, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x transformed byte by byte."""
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then two Linears; each adds to x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, changed a little."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Bytes int64 [N, T] to logits of the byte after each, [N, T, 256]; T is at most LENGTH."""

    def __init__(self, width: int = 64, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.embed(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean over the bytes of `rows` but the first."""
    return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def load_text(num_bytes: int = 200_000) -> torch.Tensor:
    """Return the first bytes of the Python sources that came with this interpreter, uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:num_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def global_batch(text: torch.Tensor, step: int, batch_size: int) -> torch.Tensor:
    """Return the samples of a step, int64 [batch_size, LENGTH + 1]: the same on every rank."""
    starts = torch.randint(len(text) - LENGTH, (batch_size,), generator=torch.Generator().manual_seed(step))
    return text[starts[:, None] + torch.arange(LENGTH + 1)].long()


def plain_losses(model: nn.Module, text: torch.Tensor, steps: int, batch_size: int, **adamw: float) -> list[float]:
    """Train by plain PyTorch on one process, whole batches, gradients clipped to 1, and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    losses = []
    for step in range(steps):
        rows = global_batch(text, step, batch_size)
        loss = next_byte_loss(model(rows[:, :-1]), rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ready_deepspeed() -> ModuleType:
    """Import DeepSpeed for the devices that are there, and return it."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by the import; it would look for other devices first
    try:
        import deepspeed
    except ModuleNotFoundError:
        raise SystemExit("DeepSpeed is not installed: pip install 'shardwise[deepspeed]'") from None
    if "RANK" not in os.environ:
        raise SystemExit(
            "start it by deepspeed --num_gpus=2, torchrun --nproc_per_node=2 or shardwise launch --nproc 2"
        )
    # On CPU, the first init_distributed would compile an all-reduce through shared memory, for most of a minute.
    # It saves little here, and without LOCAL_SIZE, which only the deepspeed launcher sets, it crashes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch 2.13 has new names for two collectives, DeepSpeed 0.19 calls them by the old.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    return deepspeed
