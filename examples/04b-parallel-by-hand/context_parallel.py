"""Context parallelism by hand: every rank has some tokens of each sample, and attention fetches keys and values.

    torchrun --nproc_per_node=2 context_parallel.py
    torchrun --nproc_per_node=2 context_parallel.py --way gather

All layers but attention work token by token and do not notice the split. Attention needs the keys and values of all
earlier tokens. `ring` (ring attention, 2023) passes them from rank to rank and merges partial softmaxes, so that a
rank never has those of more than two ranks; `gather` (as Llama 3 was trained) collects them all first: simpler, and
all keys and values in memory at once. Weights are replicated, so their gradients are summed as in DDP.
"""

import argparse
from typing import NamedTuple

import torch
import torch.distributed as dist
from by_hand import (
    Attention,
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


def exchange(tensors: list[torch.Tensor]) -> tuple[list, list[torch.Tensor]]:
    """Begin to send tensors to the next rank and to receive those of the rank before; return works and buffers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [tensor.contiguous() for tensor in tensors]  # the heads of a projection are not
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations = [dist.P2POp(dist.isend, tensor, (rank + 1) % size) for tensor in tensors]
    operations += [dist.P2POp(dist.irecv, tensor, (rank - 1) % size) for tensor in received]
    return dist.batch_isend_irecv(operations), received


def scores_of(query: torch.Tensor, key: torch.Tensor, owner: int) -> torch.Tensor | None:
    """Return masked scores [B, heads, T, T] of my queries and `owner`'s keys; None where all of them come later."""
    rank, length = dist.get_rank(), query.shape[-2]
    if owner > rank:
        return None
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if owner == rank:
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


# <ring>
class RingAttention(torch.autograd.Function):
    """softmax(query key^T) value over the tokens of all ranks, [B, heads, T of this rank, D]."""

    @staticmethod
    def forward(ctx, query, key, value):
        """Merge the results of one block of keys after the other (communicates, on every rank)."""
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = (query, key, value)
        output = torch.zeros_like(query)
        norm = torch.full(query.shape[:-1], float("-inf"), dtype=query.dtype).unsqueeze(-1)  # log of the softmax's sum
        for hop in range(size):
            # The next keys and values travel while these are used; after the last hop nobody needs them.
            works, arriving = exchange([key, value]) if hop < size - 1 else ([], [key, value])
            scores = scores_of(query, key, owner=(rank - hop) % size)
            if scores is not None:
                merged = torch.logaddexp(norm, scores.logsumexp(-1, keepdim=True))
                output = output * (norm - merged).exp() + (scores - merged).exp() @ value
                norm = merged
            for work in works:
                work.wait()
            key, value = arriving
        ctx.save_for_backward(*mine, output, norm)  # nothing of other ranks: backward fetches it again
        return output

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of this rank's queries, keys and values (communicates, on every rank)."""
        query, key, value, output, norm = ctx.saved_tensors
        rank, size = dist.get_rank(), dist.get_world_size()
        scale = query.shape[-1] ** -0.5
        correction = (gradient * output).sum(-1, keepdim=True)  # of the softmax, the same for every key
        query_gradient, key_gradient, value_gradient = (torch.zeros_like(each) for each in (query, key, value))
        for hop in range(size):
            works, arriving = exchange([key, value]) if hop < size - 1 else ([], [key, value])
            scores = scores_of(query, key, owner=(rank - hop) % size)
            if scores is not None:
                weights = (scores - norm).exp()  # the whole softmax: its sum is known from forward
                value_gradient += weights.transpose(-2, -1) @ gradient
                score_gradient = weights * (gradient @ value.transpose(-2, -1) - correction) * scale
                query_gradient += score_gradient @ key
                key_gradient += score_gradient.transpose(-2, -1) @ query
            # Gradients travel with their keys and values, every rank adds its terms, and one hop more brings them home.
            more, (key_gradient, value_gradient) = exchange([key_gradient, value_gradient])
            for work in [*works, *more]:
                work.wait()
            key, value = arriving
        return query_gradient, key_gradient, value_gradient
        # </ring>


# <gather>
class GatherTokens(torch.autograd.Function):
    """All-gather along the sequence in forward, reduce-scatter of its gradient in backward."""

    @staticmethod
    def forward(_, x):
        """Return the tokens of all ranks in order (all-gathers)."""
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(_, gradient):
        """Return the sum of all ranks' gradients of my tokens (reduce-scatters)."""
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(), dim=-2)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        return mine
        # </gather>


class ContextAttention(Attention):
    """Attention whose queries are this rank's tokens and whose keys and values are those of all ranks."""

    way = "ring"

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return [B, heads, T of this rank, D] (communicates in forward and backward)."""
        if self.way == "ring":
            return RingAttention.apply(query, key, value)
        key, value = GatherTokens.apply(key), GatherTokens.apply(value)
        first = dist.get_rank() * query.shape[-2]
        future = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).triu(first + 1)
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


class Outcome(NamedTuple):
    """What a training leaves behind on a rank."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    sent_by_attention: int | None
    """Bytes of this rank in the last step."""
    sent_for_gradients: int | None


def train(options: argparse.Namespace) -> Outcome:
    """Train on this rank's tokens of every sample (communicates, on every rank)."""
    ContextAttention.way = options.way
    model = make_decoder(options)
    for block in model.blocks:
        block.attention.__class__ = ContextAttention  # the same weights, another `attend`
    optimizer = make_optimizer(model.parameters())
    mine = torch.arange(options.length).chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for step in range(options.steps):
        began = sent_bytes()
        rows = make_batch(options, step)  # the same samples on every rank, and of each its own tokens
        loss = loss_sum(model(rows[:, mine], mine), rows[:, mine + 1]) / rows[:, 1:].numel()
        loss.backward()
        attended = sent_bytes()
        sum_gradients(model)
        ended = sent_bytes()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return Outcome(losses, model.state_dict(), difference(began, attended, 1), difference(attended, ended, 1))


# <gradients>
def sum_gradients(model: torch.nn.Module) -> None:
    """Sum the gradients over ranks. A sum, not a mean: each rank's loss was divided by the tokens of all."""
    parameters = list(model.parameters())
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    for parameter, gradient in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)
        # </gradients>


# <bytes>
def bytes_of_attention(options: argparse.Namespace, size: int) -> int:
    """Return what all ranks together send in one step for keys and values."""
    part = options.batch_size * options.length // size * options.width * 8  # one rank's keys in float64
    if options.way == "ring":  # keys and values: N - 1 hops in forward and again in backward; their gradients: N hops
        hops = 2 * (size - 1) + 2 * (size - 1) + 2 * size
    else:  # all-gather of keys and values, reduce-scatter of their gradients, which gloo computes as an all-reduce
        hops = 2 * (size - 1) + 2 * (size - 1) * (2 if dist.get_backend() == "gloo" else 1)
    return options.blocks * hops * part * size
    # </bytes>


def main() -> None:
    options = parse_options()
    start_process_group()
    size = dist.get_world_size()
    if options.length % size:
        raise SystemExit(f"--length {options.length} does not divide by {size} ranks")
    print_rank0(f"{options.way} over {size} ranks: {options.length // size} of {options.length} tokens on each")
    outcome = train(options)
    report_equality(options, outcome.losses, outcome.weights)
    report_bytes("keys, values and their gradients", outcome.sent_by_attention, bytes_of_attention(options, size))
    parameters = sum(weight.nbytes for weight in outcome.weights.values())
    report_bytes("gradients of the weights", outcome.sent_for_gradients, 2 * (size - 1) * parameters)
    leave_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Context parallelism by hand")
    add = parser.add_argument
    add("--way", choices=("ring", "gather"), default="ring", help="how keys and values come")
    add("--width", type=int, default=64, help="of the decoder")
    add("--blocks", type=int, default=4)
    add("--length", type=int, default=128, help="tokens of a sample, over all ranks")
    add("--batch-size", type=int, default=4)
    add("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
