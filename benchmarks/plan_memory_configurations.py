"""The configurations of plan_memory.py: a seeded sampler, ten chosen ones, and the job and plan of each."""

from __future__ import annotations

import dataclasses
import random

import torch

import shardwise as sw
from shardwise.plans import Plan, Precision
from shardwise.plans.sections import Offload

LINEARS = {"llama": ("qkv", "attn.out", "gate", "up", "down"), "gpt2": ("qkv", "attn.out", "up", "down")}
"""Names of the linear layers of a block."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One draw of the sampler."""

    architecture: str
    width: int
    layers: int
    length: int
    """Tokens of a sample, or pixels of an image's side."""
    micro_batch: int
    strategy: str
    ranks: int
    recompute: str
    precision: str
    optimizer: str
    accumulation: int
    compiled: str = "none"
    offload: str = "none"
    """"optimizer", or "all" for parameters, too."""
    lora: int = 0
    """Rank of adapters on every linear layer of a block, whose weights are in bf16 on a GPU."""
    parameter: str = "fp32"
    states: str = "fp32"


def new_configurations(*, on_gpu: bool) -> list[Configuration]:
    """Return the ten configurations with offload, adapters, float8, compilation and narrow states."""
    size = (2048, 16, 1024, 4) if on_gpu else (128, 3, 64, 4)
    precision = "bf16" if on_gpu else "fp32"
    base = Configuration("llama", *size, "zero3", 8, "none", precision, "adamw", 1)
    changes: list[dict] = [{"lora": 16}, {"lora": 16, "strategy": "ddp", "ranks": 2, "recompute": "full"}]
    if on_gpu:
        changes += [
            {"strategy": "zero2", "offload": "optimizer"},
            {"offload": "all", "accumulation": 2},
            {"precision": "float8", "compiled": "blocks"},
            {"precision": "float8", "compiled": "blocks", "recompute": "full", "strategy": "ddp"},
            {"compiled": "blocks"},
            {"compiled": "blocks", "strategy": "ddp", "architecture": "gpt2"},
            {"parameter": "bf16", "states": "bf16", "strategy": "ddp"},
            {"states": "int8", "strategy": "zero2"},
        ]
    return [dataclasses.replace(base, **change) for change in changes]


def draw(number: int, *, on_gpu: bool, seed: int = 6) -> list[Configuration]:
    """Return `number` configurations, each architecture and strategy about equally often."""
    chance = random.Random(seed)
    found = []
    while len(found) < number:
        architecture = ("gpt2", "llama", "resnet")[len(found) % 3]
        strategy = chance.choice(("ddp", "zero1", "zero2", "zero3", "tp"))
        if architecture == "resnet" and strategy == "tp":
            continue
        images = architecture == "resnet"
        found.append(
            Configuration(
                architecture=architecture,
                width=chance.choice((1024, 1536, 2048) if on_gpu else (128, 192)),
                layers=chance.choice((18, 50)) if images else chance.choice((8, 16, 24) if on_gpu else (3, 5)),
                length=chance.choice((160, 224) if on_gpu else (32,))
                if images
                else chance.choice((512, 1024, 2048) if on_gpu else (64, 128)),
                micro_batch=chance.choice((16, 32, 64) if on_gpu else (4, 8))
                if images
                else chance.choice((1, 2, 4, 8)),
                strategy=strategy,
                ranks=chance.choice((2, 4, 8)) if strategy == "tp" else chance.choice((2, 4, 8, 16, 32, 64)),
                recompute=chance.choice(("none", "selective", "full")),
                precision=chance.choice(("bf16", "fp32")) if on_gpu else "fp32",
                optimizer=chance.choice(("adamw", "sgd")),
                accumulation=chance.choice((1, 1, 2)),
            )
        )
    return found


class Rows(torch.utils.data.Dataset):
    """Random samples of a configuration."""

    def __init__(self, drawn: Configuration) -> None:
        self.drawn = drawn

    def __len__(self) -> int:
        return 1 << 15  # three steps of the largest global batch: a step with padding rows would need more memory

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        if self.drawn.architecture == "resnet":
            side = self.drawn.length
            return torch.randn(3, side, side, generator=generator), index % 1000
        row = torch.randint(0, 8000, (self.drawn.length + 1,), generator=generator)
        return row[:-1], row[1:]


def build(drawn: Configuration) -> tuple[sw.Job, Plan]:
    """Return the job and the plan of a configuration."""
    name = f"tp{drawn.ranks}" if drawn.strategy == "tp" else drawn.strategy
    dp_size = Plan.preset(name, drawn.ranks).layout.dp
    batch_size = dp_size * drawn.micro_batch * drawn.accumulation
    places = {
        "none": Offload(),
        "optimizer": Offload(optimizer="cpu"),
        "all": Offload(parameters="cpu", optimizer="cpu"),
    }
    plan = dataclasses.replace(
        Plan.preset(name, drawn.ranks, batch_size=batch_size, accumulation=drawn.accumulation),
        precision=Precision(
            compute=drawn.precision,
            parameter=drawn.parameter,
            # DDP reduces gradients in the dtype of their parameters.
            reduce=drawn.parameter if drawn.strategy == "ddp" else "fp32",
            optimizer=drawn.states,
        ),
        offload=places[drawn.offload],
        compile=drawn.compiled,
        recompute=drawn.recompute,
        batch_norm="local",
    )
    job = sw.Job(
        model=lambda: make_model(drawn),
        data=lambda split: Rows(drawn) if split == "train" else None,
        loss=sw.losses.cross_entropy if drawn.architecture == "resnet" else sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-4) if drawn.optimizer == "adamw" else sw.sgd(lr=1e-4, momentum=0.9),
        batch_size=batch_size,
        steps=3,
        lora=sw.Lora(targets=LINEARS[drawn.architecture], rank=drawn.lora) if drawn.lora else None,
    )
    return job, plan


def make_model(drawn: Configuration) -> torch.nn.Module:
    """Return the untrained model."""
    if drawn.architecture == "resnet":
        return {18: sw.models.resnet18, 50: sw.models.resnet50}[drawn.layers]()
    heads = drawn.width // 64 if drawn.width >= 1024 else 8
    groups = {"num_kv_heads": 8, "mlp_width": 8 * (drawn.width // 3)} if drawn.architecture == "llama" else {}
    model = sw.models.decoder(
        "llama3-8b" if drawn.architecture == "llama" else "gpt2",
        width=drawn.width,
        num_layers=drawn.layers,
        num_heads=heads,
        vocab_size=8000,
        context=drawn.length,
        **groups,
    )
    return model.bfloat16() if drawn.lora and drawn.precision == "bf16" else model


def summary(one: Configuration) -> str:
    """Return a configuration in a line."""
    return (
        f"{one.architecture:7} {one.width:5} x{one.layers:<3} len {one.length:4} batch"
        f" {one.micro_batch:2}x{one.accumulation} {one.strategy + str(one.ranks):8} {one.recompute:9} {one.precision}"
        f" {one.optimizer:5} {extras(one)}"
    )


def extras(one: Configuration) -> str:
    """Return what the sampler does not draw."""
    fields = {"compiled": "none", "offload": "none", "lora": 0, "parameter": "fp32", "states": "fp32"}
    given = {name: getattr(one, name) for name, default in fields.items() if getattr(one, name) != default}
    return " ".join(f"{name}={value}" for name, value in given.items())
