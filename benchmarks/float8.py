"""Float8: forward and backward of one linear layer in float8 and in bf16, by the sizes of the layer.

`FLOAT8_LEAST_WIDTH` of shardwise/plans/rules.py comes from this table. A layer with bf16 weights is compiled and
computes the gradients of its input and its weight; on a GPU, the calls are captured in a CUDA graph, so that launches
cost nothing, as in a captured step. torchao's recipes: tensorwise, and rowwise with the weight gradient in bf16. The
casts of inputs read them once more here; in a model, the compiler fuses them with the operation before, so that layers
gain somewhat more than in this table.

Without a GPU, `--quick` tries the script on one small layer with emulated products; its figures mean nothing there.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from figures import figure
from step_loops import forget

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTHS = (512, 768, 1024, 1536, 2048, 3072, 4096)
LAYERS = (
    *((16_384, width, width) for width in WIDTHS),
    (16_384, 1024, 2816),
    (16_384, 2048, 256),
    (16_384, 2048, 5632),
    (16_384, 5632, 2048),
    (8192, 4096, 1024),
    (8192, 4096, 14_336),
    (8192, 14_336, 4096),
)
"""Tokens, inputs and outputs: squares, and layers of the shapes of board.py."""
TINY = ((32, 64, 64),)
RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise_with_gw_hp"}


def make_layer(inputs: int, outputs: int, recipe: str, device: torch.device) -> nn.Module:
    """Return one linear layer with bf16 weights, converted by torchao unless the recipe is bf16."""
    holder = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16))
    if recipe == "bf16":
        return holder
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(RECIPES[recipe])
    if device.type != "cuda":
        object.__setattr__(config, "emulate", True)
    return convert_to_float8_training(holder, config=config)


def make_call(layer: nn.Module, tokens: int, inputs: int, outputs: int, device: torch.device) -> Callable:
    """Return a function that computes forward and backward once; a replayed CUDA graph on a GPU."""
    options = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(tokens, inputs, **options, requires_grad=True)
    slope = torch.randn(tokens, outputs, **options)
    run = torch.compile(layer, dynamic=False, backend="inductor" if device.type == "cuda" else "aot_eager")

    def call() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(run(x), [x, *layer.parameters()], slope)

    return captured(call, device)


def captured(call: Callable, device: torch.device) -> Callable:
    """Return a function that replays a call as a CUDA graph; the call itself without a GPU."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    kept = call, results  # the graph has their addresses only

    def replay() -> tuple:
        graph.replay()
        return kept

    return replay


def call_seconds(call: Callable, device: torch.device, *, rounds: int, size: int = 20) -> float:
    """Return the median seconds of one call, over rounds of `size` calls."""
    found = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(size):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / size)
    return statistics.median(found[1:])


def measure(layer: tuple[int, int, int], recipe: str, device: torch.device, *, rounds: int) -> float:
    """Return the seconds of one layer; NaN, and a line, if it fails."""
    tokens, inputs, outputs = layer
    try:
        call = make_call(make_layer(inputs, outputs, recipe, device), tokens, inputs, outputs, device)
        return call_seconds(call, device, rounds=rounds)
    except Exception as error:  # noqa: BLE001 - one layer that fails must not take the others' figures along
        print(f"  {recipe} failed: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
        return float("nan")


def compare(layers: list[tuple[int, int, int]], device: torch.device, *, rounds: int, deadline: float) -> None:
    """Print one line and two figures per layer, and the least square width from which every wider one gains."""
    gains: dict[str, dict[int, float]] = {recipe: {} for recipe in RECIPES}
    print(f"{'tokens x inputs x outputs':28} {'bf16 ms':>9} {'tensorwise':>11} {'rowwise':>9} {'x bf16':>15}")
    for layer in layers:
        name = "x".join(map(str, layer))
        if time.monotonic() > deadline:
            print(f"{name} left out, because --limit-s has passed")
            continue
        seconds = {}
        for recipe in ("bf16", *RECIPES):
            seconds[recipe] = measure(layer, recipe, device, rounds=rounds)
            forget(device)
        ratios = {recipe: seconds["bf16"] / seconds[recipe] for recipe in RECIPES}
        times = f"{seconds['bf16'] * 1e3:9.3f} {seconds['tensorwise'] * 1e3:11.3f} {seconds['rowwise'] * 1e3:9.3f}"
        print(f"{name:28} {times} {ratios['tensorwise']:7.2f} {ratios['rowwise']:7.2f}")
        for recipe, ratio in ratios.items():
            figure(f"float8.{name}.{recipe}", ratio, "x-bf16")
            if layer[1] == layer[2]:
                gains[recipe][layer[1]] = ratio
    for recipe, by_width in gains.items():
        print(f"{recipe}: {least_gain(by_width)}")


def least_gain(by_width: dict[int, float]) -> str:
    """Return the least square width that gains, together with all wider ones, as text."""
    widths = sorted(by_width)
    least = next((width for width in widths if all(by_width[each] > 1 for each in widths if each >= width)), None)
    return "no square layer gains" if least is None else f"square layers gain from width {least}"


def parse_layer(text: str) -> tuple[int, int, int]:
    tokens, inputs, outputs = map(int, text.split("x"))
    return tokens, inputs, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds; one tiny layer without a GPU")
    parser.add_argument("--layers", nargs="+", type=parse_layer, metavar="TOKENSxINPUTSxOUTPUTS")
    parser.add_argument(
        "--limit-s", type=float, default=3600.0, help="seconds after which no further layer is measured"
    )
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed: pip install 'shardwise[float8]'")
        return
    if not on_gpu and not options.quick:
        print("no CUDA device: float8 is measured on a GPU only (--quick tries the script on the CPU)")
        return
    sys.stdout.reconfigure(line_buffering=True)
    device = torch.device("cuda" if on_gpu else "cpu")
    print(f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}, torch {torch.__version__}")
    layers = options.layers or (LAYERS if on_gpu else TINY)
    compare(list(layers), device, rounds=2 if options.quick else 5, deadline=time.monotonic() + options.limit_s)


if __name__ == "__main__":
    main()
