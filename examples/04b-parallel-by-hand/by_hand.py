"""What the scripts of this chapter share: a small decoder, its training on one process, and a counter of sent bytes."""

import os
import socket
import stat
import struct
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

HEAD_WIDTH = 16
LEARNING_RATE = 0.1
DTYPE = torch.float64
"""So that a difference from one process can only be a mistake: rounding is 1e-15 here, and 1e-7 in float32."""


class Attention(nn.Module):
    """Causal attention, [B, T, width] to itself. It counts its heads in the tensors: a rank may have only some."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x mixed over the tokens before each."""
        heads = [part(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return softmax(query key^T) value for each head, [B, heads, T, HEAD_WIDTH]."""
        return scaled_dot_product_attention(query, key, value, is_causal=True)


class Mlp(nn.Module):
    """Two linear layers, [B, T, width] to itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x transformed token by token."""
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, width] of the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Bytes int64 [B, T] to logits of the next byte, [B, T, 256]."""

    def __init__(self, width: int, num_blocks: int, length: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits; `positions` [T] are those of the tokens, 0, 1, 2, ... unless given."""
        x = self.embed_tokens(tokens, positions)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def embed_tokens(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return [B, T, width]: what the first block reads."""
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        return self.embed(tokens) + self.position(positions)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, 256] of what the last block wrote."""
        return self.head(self.norm(x))


def make_decoder(options) -> Decoder:
    """Return the decoder with the same values on every rank."""
    torch.manual_seed(0)
    return Decoder(options.width, options.blocks, options.length).to(DTYPE)


def make_batch(options, step: int) -> torch.Tensor:
    """Return the samples of a step, int64 [batch_size, length + 1] of Python's own sources: equal on every rank."""
    source = min(Path(sysconfig.get_path("stdlib")).glob("*.py")).read_bytes()
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - options.length, (options.batch_size,), generator=generator)
    return text[starts[:, None] + torch.arange(options.length + 1)].long()


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss summed over tokens; the caller divides by the tokens of the whole batch."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def make_optimizer(parameters) -> torch.optim.Optimizer:
    """Return plain SGD: Adam divides by the gradient's size and would hide one that is wrong by a factor."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def train_alone(options) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on this process by itself, without communication; return the losses and the final weights."""
    model = make_decoder(options)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(options.steps):
        rows = make_batch(options, step)
        loss = loss_sum(model(rows[:, :-1]), rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def report_equality(options, losses: list[float], weights: dict[str, torch.Tensor]) -> None:
    """Compare losses and whole weights with one process, on rank 0; end with exit code 1 if they differ."""
    if dist.get_rank() != 0:
        return
    expected_losses, expected = train_alone(options)
    loss_error = max(abs(one - other) for one, other in zip(losses, expected_losses, strict=True))
    weight_error = max((weights[name] - expected[name]).abs().max().item() for name in expected)
    print(f"losses {' '.join(f'{loss:.6f}' for loss in losses)}")
    print(f"one process: losses differ by at most {loss_error:.1e}, weights by {weight_error:.1e}")
    if max(loss_error, weight_error) > 1e-9:
        raise SystemExit("this is not the training of one process")


def report_bytes(what: str, measured: int | None, theory: float) -> None:
    """Print the bytes that all ranks sent in one step beside those of the formula (communicates, on every rank)."""
    total = torch.tensor(measured or 0)
    dist.all_reduce(total)
    found = "not measured" if measured is None else f"{total.item():>12,}"
    print_rank0(f"{what:<34} {theory:>12,.0f} bytes in theory, {found} on TCP")


def sent_bytes() -> int | None:
    """Return the bytes that this process has sent on its TCP sockets, as Linux counts them; None elsewhere."""
    if not sys.platform.startswith("linux") or dist.get_backend() != "gloo":
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed in the meantime, or not TCP
            continue
        if len(info) >= 208:
            total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


def difference(before: int | None, after: int | None, steps: int) -> int | None:
    """Return the bytes of one step."""
    return None if before is None or after is None else (after - before) // steps


def start_process_group() -> None:
    """Join the process group that the launcher describes, on the CPU."""
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit(f"start it by torchrun --nproc_per_node=2 {Path(sys.argv[0]).name}")
    dist.init_process_group("gloo")


def leave_process_group() -> None:
    """Leave together: a rank that ends first closes connections that others still use."""
    dist.barrier()
    dist.destroy_process_group()


def print_rank0(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)
