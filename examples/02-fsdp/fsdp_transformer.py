"""A Llama-shaped decoder, sharded in three ways: plain FSDP2, a loop of one's own with shardwise, a described job.

    torchrun --nproc_per_node=2 fsdp_transformer.py --policy block --recompute full
    torchrun --nproc_per_node=2 fsdp_transformer.py --steps 40 --save-every 10 --resume
    torchrun --nproc_per_node=2 fsdp_transformer.py --plan fsdp
    shardwise train fsdp_transformer.py --nproc 2 --plan fsdp

The first two lines are plain PyTorch and never have the whole model on a rank: it is built on the meta device, sharded
by a wrap policy, and initialized one tensor at a time. They have a learning-rate schedule and sharded checkpoints,
which any number of processes resumes. The third runs `sw.parallelize`, the fourth needs nothing below the job. All
learn the bytes of Python's own sources, so nothing is downloaded.
"""

import argparse
import math
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_basics import make_mesh, print_rank0, start_process_group
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import shardwise as sw

LENGTH = 64
"""Tokens of a sample; a token is a byte."""


def decoder(size: str = "llama-tiny", num_layers: int = 4) -> torch.nn.Module:
    """Return an untrained decoder of a published size, with a vocabulary of bytes and `num_layers` blocks."""
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


# <policies>
def one_unit_per_block(model: nn.Module) -> list[nn.Module]:
    """The usual policy: at most one block is gathered at a time, and each gather is large."""
    return list(model.blocks)


def units_of_size(model: nn.Module, least: int = 20_000) -> list[nn.Module]:
    """Any module with enough parameters of its own: for models without repeated blocks."""
    return [module for module in model.modules() if module is not model and own_size(module) >= least]


def one_unit(_: nn.Module) -> list[nn.Module]:
    """Nothing but the root: one gather of everything. Optimizer states are sharded, the peak in forward is not."""
    return []


POLICIES: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "block": one_unit_per_block,
    "size": units_of_size,
    "whole": one_unit,
}
# </policies>


def own_size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def sharded_decoder(mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    """Return the decoder as shards over `mesh`; no rank ever has more than one whole tensor (communicates)."""
    # <meta>
    with torch.device("meta"):  # shapes and names, no memory
        model = decoder(options.size, options.layers)
    if model.config.tie_head:
        raise SystemExit(f"{options.size} ties two weights, which to_empty unties: use a llama size, or --plan fsdp")
    if options.recompute == "full":
        for block in model.blocks:  # before sharding: what is computed again gathers its weights again
            block.forward = recomputed(block.forward)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    precision = low if options.precision == "bf16" else MixedPrecisionPolicy()
    policy = POLICIES[options.policy]
    for unit in [*policy(model), model]:  # inner units first, the root takes what is left
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    model.to_empty(device=mesh.device_type)  # memory for the shards
    initialize(model)
    # </meta>
    return model


def recomputed(forward: Callable) -> Callable:
    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Give every parameter values that depend on its name alone, so that all world sizes begin alike."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.ones(parameter.shape)  # norms
        if parameter.ndim > 1:
            whole.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        # src_data_rank=None: every rank has computed the same tensor, and keeps its shard without communication.
        mine = distribute_tensor(
            whole.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(mine.to_local())


def learning_rate(step: int, steps: int, warm_up: int = 5) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine to a tenth."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def global_batch(step: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of a step's batch, which depends on the step alone: a resumed run reads the same."""
    dataset = job.data("train")
    chosen = torch.randint(len(dataset), (batch_size,), generator=torch.Generator().manual_seed(step))
    mine = chosen.tensor_split(dist.get_world_size())[dist.get_rank()]
    rows = [dataset[index] for index in mine.tolist()]
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def train_plain(options: argparse.Namespace, device: torch.device) -> list[float]:
    """Train in plain PyTorch and return the losses (communicates, on every rank)."""
    if options.batch_size % dist.get_world_size():
        raise SystemExit(f"--batch-size {options.batch_size} does not divide by {dist.get_world_size()} processes")
    model = sharded_decoder(make_mesh(device), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)  # after sharding: its states are shards, too
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options.steps))
    print_rank0(f"policy {options.policy}, recompute {options.recompute}, {parameter_share(model)}")
    first = resume(model, optimizer, schedule, options.checkpoint) if options.resume else 0
    losses = []
    for step in range(first, options.steps):
        tokens, targets = (part.to(device) for part in global_batch(step, options.batch_size))
        loss = cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        loss.backward()  # all ranks have as many tokens, so FSDP's mean over ranks is the mean over the batch
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / dist.get_world_size())
        print_rank0(f"step {step + 1} of {options.steps}: loss {losses[-1]:.4f}")
        if options.save_every and (step + 1) % options.save_every == 0:
            save(model, optimizer, schedule, options.checkpoint, step + 1)
    return losses


def save(model: nn.Module, optimizer, schedule, folder: Path, step: int) -> None:
    """Write a checkpoint, each rank its shards; `fsdp_checkpoint.py` has other ways (communicates, on every rank)."""
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "schedule": schedule.state_dict(), "step": step}
    dcp.save(state, checkpoint_id=folder / f"step-{step:08d}")


def resume(model: nn.Module, optimizer, schedule, folder: Path) -> int:
    """Load the newest whole checkpoint and return its step (communicates, on every rank)."""
    # DCP writes .metadata last: a folder with it is whole.
    whole = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    if not whole:
        print_rank0(f"no checkpoint in {folder}: starting from the beginning")
        return 0
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "schedule": schedule.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=whole[-1])  # shards of this world, from files of any other
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    print_rank0(f"resumed from {whole[-1]} on {dist.get_world_size()} processes")
    return state["step"]


def train_with_shardwise(options: argparse.Namespace) -> None:
    """Train in a loop around `sw.parallelize`, which takes a model that every rank has built (see above)."""
    with sw.world() as world:
        # <loop>
        plan = sw.Plan.preset(options.plan, world.size, recompute=options.recompute, precision=options.precision)
        torch.manual_seed(0)
        model = sw.parallelize(decoder(options.size, options.layers), plan, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)  # after it: the parameters are shards now
        world.print(f"plan {plan.layout} (zero {plan.zero}), recompute {plan.recompute}, {parameter_share(model)}")

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


def main() -> None:
    options = parse_options()
    if options.plan:
        train_with_shardwise(options)
        return
    train_plain(options, start_process_group())
    dist.barrier()
    dist.destroy_process_group()


def parameter_share(model: torch.nn.Module) -> str:
    """Describe how many of the model's parameters are on this rank."""
    parameters = list(model.parameters())
    mine = sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel() for parameter in parameters
    )
    return f"rank 0 stores {mine:,} of {sum(parameter.numel() for parameter in parameters):,} parameters"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A sharded decoder")
    add = parser.add_argument
    add("--policy", choices=POLICIES, default="block", help="which modules are gathered and freed as a whole")
    add("--plan", help="use shardwise: ddp, zero2, fsdp, hsdp or a product such as replicate2.shard2")
    add("--recompute", choices=("none", "selective", "full"), default="none", help="forward again in backward")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--size", default="llama-tiny", help="a published size: gpt2, llama-7b, llama3-8b, ...")
    add("--layers", type=int, default=4)
    add("--batch-size", type=int, default=32, help="samples per step over ALL processes")
    add("--steps", type=int, default=20, help="in all, resumed ones counted")
    add("--lr", type=float, default=0.003)
    add("--save-every", type=int, metavar="STEPS", help="steps from one checkpoint to the next")
    add("--checkpoint", type=Path, default=Path("runs/fsdp_transformer"), help="folder of the checkpoints")
    add("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    options = parser.parse_args()
    if options.recompute == "selective" and not options.plan:
        parser.error("--recompute selective is shardwise's: add --plan fsdp, or use full")
    return options


if __name__ == "__main__":
    main()
