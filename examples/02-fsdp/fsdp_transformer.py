"""A Llama-shaped decoder, sharded: as a described job, and in a loop of one's own.

    shardwise train fsdp_transformer.py --nproc 2 --plan fsdp
    torchrun --nproc_per_node=2 fsdp_transformer.py --plan fsdp --recompute full

The first line needs nothing below the job. The second runs `main`: an ordinary PyTorch loop around
`sw.parallelize`, which finds the repeated blocks, shards each, and gives all ranks rank 0's weights.
Both learn the bytes of Python's own sources, so nothing is downloaded.
"""

import argparse

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import shardwise as sw

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
        # <loop>
        plan = sw.Plan.preset(options.plan, world.size, recompute=options.recompute, precision=options.precision)
        torch.manual_seed(0)
        model = sw.parallelize(decoder(options.size, options.layers), plan, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)  # after it: the parameters are shards now
        world.print(f"plan {plan.layout} (zero {plan.zero}), recompute {plan.recompute}, {held(model)}")

        train = sw.dataloader(job.data("train"), plan, world, batch_size=options.batch_size, drop_last=True)
        for step, (tokens, targets) in zip(range(options.steps), train, strict=False):
            with sw.autocast(plan):
                loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            world.print(f"step {step + 1} of {options.steps}: loss {train.mean(loss.item()):.4f}")

        weights = sw.full_state_dict(model)  # on every rank; whole tensors on rank 0, {} elsewhere
        world.print(f"whole state dict: {sum(value.numel() for value in weights.values()):,} numbers")
        # </loop>


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
