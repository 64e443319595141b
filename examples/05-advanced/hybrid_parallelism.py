"""One decoder under every product of parallel axes that fits the ranks at hand: same losses, less memory each.

    torchrun --nproc_per_node=4 hybrid_parallelism.py
    shardwise launch --nproc_per_node=2 hybrid_parallelism.py
    torchrun --nproc_per_node=4 hybrid_parallelism.py --plans pp2.shard2 shard2.tp2

A plan's name has the axes and their degrees: `shard2.tp2` is two shards (other samples, parameters sharded) of two
tensor-parallel ranks each (same samples, matrices split). On four ranks and more the last
row of the table is shard x tp by hand, in plain PyTorch.
"""

import argparse

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import shardwise as sw

LENGTH = 32
text = sw.datasets.text(length=LENGTH)

# <job>
job = sw.Job(
    model=lambda: sw.models.decoder("llama-tiny", vocab_size=256, context=LENGTH, num_layers=4),
    data=lambda split: text(split) if split == "train" else None,
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=3e-3, weight_decay=0.0),
    batch_size=16,
    steps=4,
)
# </job>

PLANS = {
    1: ["one"],
    2: ["ddp", "fsdp", "tp2", "pp2"],
    4: ["ddp", "fsdp", "replicate2.shard2", "replicate2.tp2", "shard2.tp2", "pp2.replicate2", "pp2.shard2", "pp2.tp2"],
    8: ["fsdp", "replicate2.shard2.tp2", "pp2.shard2.tp2", "pp2.replicate2.shard2"],
}
"""World size -> plans that run without --plans."""


def train(plan: sw.Plan, world: sw.World) -> tuple[list[float], float]:
    """Train the job under `plan`; return the losses and the share of parameters on rank 0 (on every rank)."""
    # <train>
    step = sw.build_step(job, plan, world)
    shares = [step(batch).loss_share for batch in step.feed]
    # </train>
    losses = [world.sum({"loss": share.item()})["loss"] for share in shares]  # of all ranks: the global loss
    return losses, parameter_share(parameter for _, parameter in step.named_parameters())


def plain_model(weights: dict[str, torch.Tensor], mesh: DeviceMesh) -> torch.nn.Module:
    """Return the decoder sharded over a mesh of axes "shard" and "tp", by hand (communicates, on every rank)."""
    # <plain>
    model = job.model()
    model.load_state_dict(weights)  # whole on every rank: fine for small models only
    styles = {  # column then row: one all-reduce for each pair, in forward and in backward
        "attn.qkv": ColwiseParallel(),
        "attn.out": RowwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], styles)  # tensor parallel first: it replaces the parameters
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    # </plain>
    return model


def train_plain(world: sw.World) -> tuple[list[float], float]:
    """Train shard x tp by hand on the samples and first weights of the described job (on every rank)."""
    shard, tp = world.size // 2, 2
    plan = sw.Plan.preset(f"shard{shard}.tp{tp}", world.size, batch_size=job.batch_size)
    described = sw.build_step(job, plan, world)  # never called: it gives us the samples of this rank, and the weights
    weights = world.gather(sw.full_state_dict(described.model))[0]
    mesh = init_device_mesh(world.device.type, (shard, tp), mesh_dim_names=("shard", "tp"))
    model = plain_model(weights, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for batch in described.feed:
        tokens, targets = batch.micro_batches[0].batch
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / batch.denominator
        (loss * shard).backward()  # FSDP2 averages over the shard axis; tensor parallel ranks see the same loss
        optimizer.step()
        optimizer.zero_grad()
        losses.append(world.sum({"loss": loss.item() / tp})["loss"])
    return losses, parameter_share(model.parameters())


def parameter_share(parameters) -> float:
    """Return the fraction of the model's parameters that this rank stores."""
    mine = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in parameters)
    return mine / sum(each.numel() for each in job.model().parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description="One decoder under products of parallel axes")
    parser.add_argument("--plans", nargs="+", metavar="PLAN", help="presets or products, such as pp2.shard2")
    options = parser.parse_args()
    with sw.world() as world:
        world.print(f"{'plan':<24}{'on rank 0':<14}losses")
        results = {}
        for name in options.plans or PLANS.get(world.size, ["fsdp"]):
            plan = sw.Plan.preset(name, world.size, batch_size=job.batch_size)
            results[name] = train(plan, world)
            world.print(row(name, *results[name]))
        if world.size > 2 and world.size % 2 == 0:
            results["by hand"] = train_plain(world)
            world.print(row(f"shard{world.size // 2}.tp2 by hand", *results["by hand"]))
        last = [losses[-1] for losses, _ in results.values()]
        world.print(f"last losses differ by {max(last) - min(last):.1e}")


def row(name: str, losses: list[float], share: float) -> str:
    return f"{name:<24}{share:<14.0%}" + " ".join(f"{loss:.5f}" for loss in losses)


if __name__ == "__main__":
    main()
