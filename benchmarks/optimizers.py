"""Optimizer kinds: one update of AdamW and SGD by torch's three implementations, on parameters of three models.

One process, one core, no model: parameters and gradients of a model's shapes are drawn, and the kinds take turns; the
fastest of `--rounds` each, in ms. `job/optimizers.py` chooses by what is printed here; the figures show how far its
choice is from the fastest of them.

loop       one parameter after the other
foreach    one operator for all parameters, step by step of the formula
fused      one operator for all parameters and the whole formula
compiled   AdamW of shardwise, one compiled kernel for each parameter in a CUDA graph; on a GPU only.
           parallel/optimizer.py chooses it for large parameters of captured steps
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch

from figures import figure
from shapes import LLAMA_1B
from shardwise import models
from shardwise.job.optimizers import fastest_kind
from shardwise.parallel.optimizer import is_faster_compiled, mixed_optimizer
from shardwise.plans import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "mlp": lambda: torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))),
    "resnet18": lambda: models.resnet18(num_classes=10, stem="small"),
    "decoder": lambda: models.decoder("gpt2-tiny", width=256, num_layers=12, num_heads=4, vocab_size=4096),
    "1b": lambda: models.decoder(LLAMA_1B),
}
KINDS = {"loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters, **kind: torch.optim.AdamW(parameters, lr=1e-6, **kind),
    "sgd": lambda parameters, **kind: torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, **kind),
}
NOISE = 1.1
"""Kinds within this of the fastest are as fast (spread of the fastest round on a busy machine)."""


def milliseconds(device: torch.device, rounds: int, steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Run each of `steps` once in every round; returns the fastest: other load on the machine only adds."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    taken: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds + 1):
        for kind, step in steps.items():
            wait()
            begun = time.perf_counter()
            step()
            wait()
            taken[kind].append(1e3 * (time.perf_counter() - begun))
    return {kind: min(times) for kind, times in taken.items()}


def named(parameters: list[torch.nn.Parameter]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(str(number), parameter) for number, parameter in enumerate(parameters)]


def captured(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return one update as a CUDA graph, in which many small kernels are launched at once."""
    for _ in range(3):
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=["mlp", "resnet18", "decoder"], choices=MODELS)
    parser.add_argument("--rounds", type=int, help="(default: 15, 5 with --quick)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: fits in a minute on two cores")
    options = parser.parse_args()
    rounds = options.rounds or (5 if options.quick else 15)
    device = torch.device(options.device)
    torch.set_num_threads(1)  # threads that wait for a busy core would be all that is measured
    kinds = [*KINDS, "compiled"] if device.type == "cuda" else [*KINDS]
    print(f"{'model':10} {'tensors':>8} {'M':>8} {'optimizer':10}" + "".join(f"{kind:>10}" for kind in kinds))
    ratios: dict[str, float] = {}
    for name in options.models:
        with torch.device("meta"):
            shapes = [parameter.shape for parameter in MODELS[name]().parameters()]
        numbers = sum(shape.numel() for shape in shapes) / 1e6
        for optimizer, make in OPTIMIZERS.items():
            parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            steps = {kind: make(parameters, **options_of_kind).step for kind, options_of_kind in KINDS.items()}
            adamw = make(parameters, fused=True) if optimizer == "adamw" else None
            if adamw is not None and device.type == "cuda":
                steps["compiled"] = captured(mixed_optimizer(adamw, named(parameters), Precision()))
            kind = fastest_kind([{"params": parameters}], fused=True, fuses_shards=optimizer == "adamw")
            chosen = "compiled" if adamw is not None and is_faster_compiled(adamw) else next(iter(kind))
            found = milliseconds(device, rounds, steps)
            ratios[f"optimizers.{optimizer}.{name}"] = found[chosen] / min(found.values())
            row = "".join(f"{found[kind]:10.3f}" for kind in kinds if kind in found)
            print(f"{name:10} {len(shapes):8} {numbers:8.1f} {optimizer:10}{row}", flush=True)
    for name, ratio in ratios.items():
        figure(name, ratio, "x-fastest-kind", at_most=NOISE)


if __name__ == "__main__":
    main()
