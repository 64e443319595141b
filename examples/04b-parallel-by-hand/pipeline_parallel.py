"""Pipeline parallelism by hand: each rank runs some of the blocks, and micro-batches follow each other through them.

    torchrun --nproc_per_node=2 pipeline_parallel.py
    torchrun --nproc_per_node=2 pipeline_parallel.py --schedule 1f1b --micro-batches 8

A stage receives activations from the stage before, computes, and sends the result to the stage after; gradients take
the way back. While the first micro-batch is on its way to the last stage, and the last one on its way back, stages
wait: the bubble, (stages - 1) / (micro-batches + stages - 1) of the time. Both schedules have the same bubble. GPipe
(2018) runs all forwards first and keeps the activations of every micro-batch; 1F1B (PipeDream, 2018) starts a backward
as soon as it can, and keeps at most as many micro-batches as there are stages.
"""

import argparse
import time
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from by_hand import (
    DTYPE,
    Decoder,
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

Action = tuple[str, int]
"""("forward" or "backward", micro-batch)."""


# <schedule>
def schedule(kind: str, stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Return the order in which a stage computes."""
    forwards = [("forward", index) for index in range(num_micro_batches)]
    backwards = [("backward", index) for index in range(num_micro_batches)]
    if kind == "gpipe":
        return forwards + backwards
    # 1F1B: enough forwards to keep the stages behind busy, then one backward for each forward, then the rest.
    warm_up = min(num_stages - 1 - stage, num_micro_batches)
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[num_micro_batches - warm_up :]
    # </schedule>


class Stage:
    """The blocks of this rank, the activations that wait for their backward, and the times at which it computed."""

    def __init__(self, model: Decoder, options: argparse.Namespace) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1
        numbers = torch.arange(options.blocks).tensor_split(self.size)[self.rank].tolist()
        self.model, self.mine = model, [model.blocks[number] for number in numbers]
        self.names = [name for name in model.state_dict() if self.owns(name, numbers)]
        self.shape = (options.batch_size // options.micro_batches, options.length, options.width)
        self.waiting: deque = deque()
        self.sends: list = []
        self.spans: list[tuple[str, int, float, float]] = []
        self.most_waiting = 0

    def owns(self, name: str, numbers: list[int]) -> bool:
        """Return whether a parameter is this stage's: its blocks, the embeddings (first), norm and head (last)."""
        if name.startswith("blocks."):
            return int(name.split(".")[1]) in numbers
        return self.is_first if name.startswith(("embed", "position")) else self.is_last

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that this stage trains."""
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.names]

    # <forward>
    def forward(self, index: int, rows: torch.Tensor, count: int) -> torch.Tensor | None:
        """Compute one micro-batch, send it to the next stage; return the loss on the last stage (communicates)."""
        received = None if self.is_first else self.receive(self.rank - 1).requires_grad_()
        began = time.perf_counter()
        x = self.model.embed_tokens(rows[:, :-1]) if self.is_first else received
        for block in self.mine:
            x = block(x)
        if self.is_last:
            x = loss_sum(self.model.logits(x), rows[:, 1:]) / count  # of the whole batch, not of this micro-batch
        self.spans.append(("forward", index, began, time.perf_counter()))
        if not self.is_last:
            self.send(x.detach(), self.rank + 1)
        self.waiting.append((received, x))
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        return x.detach() if self.is_last else None
        # </forward>

    # <backward>
    def backward(self, index: int) -> None:
        """Back-propagate the oldest micro-batch, send its gradient to the stage before (communicates)."""
        received, x = self.waiting.popleft()
        gradient = None if self.is_last else self.receive(self.rank + 1)
        began = time.perf_counter()
        x.backward(gradient)
        self.spans.append(("backward", index, began, time.perf_counter()))
        if not self.is_first:
            self.send(received.grad, self.rank - 1)
            # </backward>

    def receive(self, source: int) -> torch.Tensor:
        """Wait for a tensor of a neighbour: an activation, or its gradient."""
        tensor = torch.empty(self.shape, dtype=DTYPE)
        dist.recv(tensor, src=source)
        return tensor

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Begin to send. A blocking send would wait for a neighbour that may itself be sending: a deadlock."""
        tensor = tensor.contiguous()
        self.sends.append((dist.isend(tensor, dst=target), tensor))  # the tensor must live until it is sent

    def finish_sends(self) -> None:
        """Wait until all tensors are sent."""
        for work, _ in self.sends:
            work.wait()
        self.sends.clear()


def train_step(stage: Stage, actions: list[Action], rows: torch.Tensor, num_micro_batches: int) -> float:
    """Run the schedule once and return the loss of the batch (communicates, on every rank)."""
    micro_batches, count = rows.chunk(num_micro_batches), rows[:, 1:].numel()
    total = torch.zeros((), dtype=DTYPE)
    stage.spans.clear()
    for kind, index in actions:
        if kind == "forward":
            loss = stage.forward(index, micro_batches[index], count)
            total += 0 if loss is None else loss
        else:
            stage.backward(index)
    stage.finish_sends()
    dist.broadcast(total, src=stage.size - 1)  # only the last stage knows it
    return total.item()


class Outcome(NamedTuple):
    """What a training leaves behind on a rank."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    """Of all stages, by name."""
    sent: int | None
    """Bytes that this rank sent in a step."""
    timelines: list
    """For each step, when this stage computed."""
    most_waiting: int
    """Micro-batches whose activations this stage kept at most."""


def train(options: argparse.Namespace) -> Outcome:
    """Train the stages (communicates, on every rank)."""
    stage = Stage(make_decoder(options), options)
    optimizer = make_optimizer(stage.parameters())
    actions = schedule(options.schedule, stage.rank, stage.size, options.micro_batches)
    losses, timelines = [], []
    before = sent_bytes()
    for step in range(options.steps):
        dist.barrier()
        losses.append(train_step(stage, actions, make_batch(options, step), options.micro_batches))
        optimizer.step()
        optimizer.zero_grad()
        timelines.append(list(stage.spans))
    measured = difference(before, sent_bytes(), options.steps)
    state = stage.model.state_dict()
    parts = [None] * stage.size
    dist.all_gather_object(parts, {name: state[name] for name in stage.names})
    weights = {name: value for part in parts for name, value in part.items()}
    return Outcome(losses, weights, measured, timelines, stage.most_waiting)


# <bytes>
def bytes_of_a_step(options: argparse.Namespace, num_stages: int) -> int:
    """Return what all ranks together send in one step: activations forward, their gradients backward."""
    activation = options.batch_size * options.length * options.width * 8  # [B, T, width] in float64
    return 2 * (num_stages - 1) * activation


def bubble_in_theory(num_stages: int, num_micro_batches: int) -> float:
    """Return the share of the time in which a stage waits, if all stages take equally long."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
    # </bytes>


def main() -> None:
    options = parse_options()
    start_process_group()
    size = dist.get_world_size()
    if options.batch_size % options.micro_batches or options.blocks < size:
        raise SystemExit("--micro-batches must divide --batch-size, and every stage needs a block")
    print_rank0(f"{options.schedule} over {size} stages, {options.micro_batches} micro-batches")
    outcome = train(options)
    report_equality(options, outcome.losses, outcome.weights)
    report_bytes("activations and their gradients", outcome.sent, bytes_of_a_step(options, size))
    report_timeline(outcome, options.micro_batches)
    leave_process_group()


def report_timeline(outcome: Outcome, num_micro_batches: int) -> None:
    """Print the bubble and the activations that wait, and draw the step with the smallest bubble (gathers)."""
    size = dist.get_world_size()
    everyone = [None] * size
    dist.all_gather_object(everyone, (outcome.timelines, outcome.most_waiting))
    steps = [[timelines[step] for timelines, _ in everyone] for step in range(len(outcome.timelines))]
    best = min(steps, key=bubble)  # in the others the machine also did something else
    theory = bubble_in_theory(size, num_micro_batches)
    print_rank0(f"{'bubble':<34} {theory:>12.1%} in theory, {bubble(best):>18.1%} measured")
    print_rank0(f"{'micro-batches kept, by stage':<34} {' '.join(str(most) for _, most in everyone)}")
    for rank, spans in enumerate(best):
        print_rank0(f"stage {rank}  {draw(spans, *ends(best))}")


def ends(stages: list) -> tuple[float, float]:
    """Return when the first stage began and the last one ended: the clock is one, as all ranks share a machine."""
    return min(spans[0][2] for spans in stages), max(span[3] for spans in stages for span in spans)


def bubble(stages: list) -> float:
    """Return the share of the time in which stages did not compute."""
    began, ended = ends(stages)
    busy = sum(span[3] - span[2] for spans in stages for span in spans)
    return 1 - busy / (len(stages) * (ended - began))


def draw(spans: list, began: float, ended: float, columns: int = 72) -> str:
    """Return a line of time: 0, 1, 2 are forwards of that micro-batch, a, b, c their backwards, a dot is waiting."""
    line = ["."] * columns
    scale = columns / (ended - began)
    for kind, index, start, end in spans:
        letter = str(index % 10) if kind == "forward" else chr(ord("a") + index % 26)
        first = min(int((start - began) * scale), columns - 1)
        last = max(first + 1, int((end - began) * scale))
        line[first:last] = letter * (last - first)
    return "".join(line)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pipeline parallelism by hand")
    add = parser.add_argument
    add("--schedule", choices=("gpipe", "1f1b"), default="gpipe")
    add("--micro-batches", type=int, default=4)
    add("--width", type=int, default=64, help="of the decoder")
    add("--blocks", type=int, default=8)
    add("--length", type=int, default=64, help="tokens of a sample")
    add("--batch-size", type=int, default=16)
    add("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
