"""A Llama-shaped decoder, sharded: as a described job, and in a loop of one's own.

    shardwise train fsdp_transformer.py --nproc 2 --plan fsdp
    torchrun --nproc_per_node=2 fsdp_transformer.py --plan fsdp --recompute full

The first line needs nothing below the job. The second runs `main`: an ordinary PyTorch loop around
`sw.parallelize`, which finds the repeated blocks, shards each, and gives all ranks rank 0's weights.
Both learn the bytes of Python's own sources, so nothing is downloaded.
"""

import argparse
import dataclasses

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import shardwise as sw
from shardwise.plans import Precision

LENGTH = 64
"""Tokens of a sample; a token is a byte."""


def decoder(size: str = "llama-tiny", num_layers: int = 4) -> torch.nn.Module:
    """Return an untrained decoder of a published size, cut to bytes and to `num_layers` blocks."""
    return sw.models.decoder(size, vocab_size=256, context=LENGTH, num_layers=num_layers)


# <job>
job = sw.Job(
    model=decoder,
    data=sw.datasets.text(length=LENGTH),
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=3e-3),
    clip_norm=1.0,
    batch_size=32,
    steps=20,
)
# </job>


def main() -> None:
    options = parse_options()
    with sw.world() as world:
        say = print if world.is_main else lambda *_: None
        # <loop>
        plan = dataclasses.replace(
            sw.Plan.preset(options.plan, world.size),
            recompute=options.recompute,
            precision=Precision(compute=options.precision),
        )
        torch.manual_seed(0)
        model = sw.parallelize(decoder(options.size, options.layers), plan, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)  # after it: the parameters are shards now
        say(f"plan {plan.layout} (zero {plan.zero}), recompute {plan.recompute}, {held(model)}")

        for step, (tokens, targets) in enumerate(batches(world, options.batch_size, options.steps)):
            with torch.autocast(world.device.type, torch.bfloat16, enabled=needs_autocast(plan)):
                loss = cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = world.sum({"loss": loss.item()})["loss"] / world.size
            say(f"step {step + 1} of {options.steps}: loss {mean:.4f}")

        weights = sw.full_state_dict(model)  # on every rank; whole tensors on rank 0, {} elsewhere
        say(f"whole state dict: {sum(value.numel() for value in weights.values()):,} numbers")
        # </loop>


def batches(world: sw.World, batch_size: int, steps: int):
    """Yield this rank's equal share of each global batch: tokens and targets, int64 [rows, LENGTH]."""
    if batch_size % world.size:
        raise SystemExit(f"--batch-size {batch_size} does not divide by {world.size} processes")
    dataset = job.data("train")
    for step in range(steps):
        picked = torch.randint(len(dataset), (batch_size,), generator=torch.Generator().manual_seed(step))
        rows = [dataset[index] for index in picked.tolist()[world.rank :: world.size]]
        yield tuple(torch.stack(part).to(world.device) for part in zip(*rows, strict=True))


def needs_autocast(plan: sw.Plan) -> bool:
    """Whether the loop must cast to bf16: where FSDP2 shards parameters, it casts them while it gathers."""
    return plan.precision.compute == "bf16" and plan.zero < 2


def held(model: torch.nn.Module) -> str:
    """Say how many of the model's numbers this rank holds."""
    parameters = list(model.parameters())
    mine = sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel() for parameter in parameters
    )
    return f"rank 0 holds {mine:,} of {sum(parameter.numel() for parameter in parameters):,} parameters"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A sharded decoder in a loop of one's own")
    add = parser.add_argument
    add("--plan", default="fsdp", help="ddp, zero2, fsdp, hsdp or a product such as replicate2.shard2")
    add("--recompute", choices=("none", "selective", "full"), default="none", help="forward again in backward")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--size", default="llama-tiny", help="a published size: gpt2, llama-7b, llama3-8b, ...")
    add("--layers", type=int, default=4)
    add("--batch-size", type=int, default=32, help="samples per step over ALL processes")
    add("--steps", type=int, default=20)
    add("--lr", type=float, default=0.003)
    return parser.parse_args()


if __name__ == "__main__":
    main()
