"""Tensor parallelism by hand: every large matrix is split over the ranks, and all ranks read the same samples.

    torchrun --nproc_per_node=2 tensor_parallel.py
    shardwise launch --nproc_per_node=2 tensor_parallel.py

The idea (Megatron-LM, 2019): split the first matrix of a pair by its OUTPUT features and the second by its INPUT
features. Each rank then computes its heads, or its hidden units, from beginning to end, and the only thing left to do
is to sum the ranks' results: one all-reduce after each pair in forward, and one before it in backward.
"""

import argparse

import torch
import torch.distributed as dist
from by_hand import (
    HEAD_WIDTH,
    difference,
    leave_process_group,
    loss_sum,
    make_batch,
    make_decoder,
    make_optimizer,
    print_rank0,
    report_bytes,
    report_equality,
    sent_bytes,
    start_process_group,
)
from torch import nn


# <functions>
class CopyToRanks(torch.autograd.Function):
    """Identity in forward. Every rank uses x, so in backward the gradients of all ranks are summed."""

    @staticmethod
    def forward(_, x):
        """Return x as it is."""
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        """Return the sum of all ranks' gradients (all-reduces)."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class SumOverRanks(torch.autograd.Function):
    """Sum in forward. Every rank contributed one term, so in backward each gets the gradient as it is."""

    @staticmethod
    def forward(_, x):
        """Return the sum of all ranks' x (all-reduces)."""
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_, gradient):
        """Return the gradient as it is."""
        return gradient
        # </functions>


class SplitPair(nn.Module):
    """An Attention or an Mlp of which this rank has some heads, or some hidden units; the result is whole."""

    def __init__(self, inner: nn.Module, first: tuple[str, ...], second: str) -> None:
        super().__init__()
        self.inner = inner
        for name in first:  # rows of the weight: output features
            linear = getattr(inner, name)
            linear.weight, linear.bias = my_part(linear.weight, 0), my_part(linear.bias, 0)
        last = getattr(inner, second)  # columns of the weight: input features
        last.weight = my_part(last.weight, 1)
        # The bias is added once, after the sum: left inside, N ranks would add it N times.
        self.bias, last.bias = last.bias, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks (all-reduces here, and once in backward)."""
        return SumOverRanks.apply(self.inner(CopyToRanks.apply(x))) + self.bias


def my_part(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    """Return this rank's part of a parameter, contiguous and without the rest in memory."""
    part = nn.Parameter(parameter.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())
    part.split_dim = dim
    return part


def split(model: nn.Module) -> nn.Module:
    """Split the matrices of every block; embedding, norms and head stay whole, with equal gradients on all ranks."""
    for block in model.blocks:
        block.attention = SplitPair(block.attention, ("query", "key", "value"), "out")
        block.mlp = SplitPair(block.mlp, ("up",), "down")
    return model


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights under the names of the unsplit decoder (gathers, on every rank)."""
    weights = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if hasattr(parameter, "split_dim"):
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, value)
            value = torch.cat(parts, parameter.split_dim)
        plain = name.replace("attention.bias", "attention.out.bias").replace("mlp.bias", "mlp.down.bias")
        weights[plain.replace("inner.", "")] = value
    return weights


def train(options: argparse.Namespace) -> tuple[list[float], dict[str, torch.Tensor], int | None]:
    """Train; return the losses, the whole weights and the bytes this rank sent in a step (on every rank)."""
    model = make_decoder(options)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model = split(model)
    mine = sum(parameter.numel() for parameter in model.parameters())
    print_rank0(
        f"tensor parallel over {dist.get_world_size()} ranks: rank 0 has {mine:,} of {num_parameters:,} parameters"
    )
    optimizer = make_optimizer(model.parameters())
    losses = []
    before = sent_bytes()
    for step in range(options.steps):
        rows = make_batch(options, step)  # the same samples on every rank
        loss = loss_sum(model(rows[:, :-1]), rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    measured = difference(before, sent_bytes(), options.steps)
    return losses, whole_weights(model), measured


# <bytes>
def bytes_of_a_step(options: argparse.Namespace, world_size: int) -> int:
    """Return what all ranks together send in one step."""
    activation = options.batch_size * options.length * options.width * 8  # [B, T, width] in float64
    all_reduces = options.blocks * 2 * 2  # each block: attention and MLP, in forward and in backward
    ring = 2 * (world_size - 1)  # an all-reduce on a ring: 2 (N - 1) / N of its bytes, by each of N ranks
    return all_reduces * ring * activation
    # </bytes>


def main() -> None:
    options = parse_options()
    start_process_group()
    world_size = dist.get_world_size()
    if options.width // HEAD_WIDTH % world_size:
        raise SystemExit(f"{options.width // HEAD_WIDTH} heads do not divide by {world_size} ranks: set --width")
    losses, weights, measured = train(options)
    report_equality(options, losses, weights)
    report_bytes(f"{4 * options.blocks} all-reduces of activations", measured, bytes_of_a_step(options, world_size))
    leave_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tensor parallelism by hand")
    add = parser.add_argument
    add("--width", type=int, default=64, help=f"of the decoder; a head has {HEAD_WIDTH}")
    add("--blocks", type=int, default=4)
    add("--length", type=int, default=64, help="tokens of a sample")
    add("--batch-size", type=int, default=8)
    add("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
