"""Packed attention: forward and backward of one attention layer by blocks, by the dense mask, and causal.

All three are one call of attention over [1, heads, tokens, width] in bf16 with the gradients of its inputs, captured in
a CUDA graph on a GPU, so that launches cost nothing. Documents have log-normal lengths around `--document` tokens. The
dense mask is what sdpa needs to compute the same; plain causal sdpa ignores documents and is the layer of an unpacked
model. Lists of blocks are derived once per step for all layers, and are timed apart.

Without a GPU, `--quick` tries the script on short rows without gradients; its figures mean nothing there.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import torch

from figures import figure
from float8 import call_seconds, captured
from shardwise.models.documents import BlockMask, attend, document_blocks, document_mask, number_documents

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH, HEADS, WIDTH = 4096, 16, 128


def make_ids(length: int, document: int, device: torch.device) -> torch.Tensor:
    """Return document ids [1, length] with log-normal lengths of about `document` tokens."""
    generator = torch.Generator().manual_seed(0)
    sizes = (torch.randn(length, generator=generator).mul(0.8).exp() * document).long().clamp(min=1)
    return torch.arange(length).repeat_interleave(sizes)[:length][None].to(device)


def make_call(documents: torch.Tensor | BlockMask | None, length: int, device: torch.device) -> Callable:
    """Return a function that computes attention, and on a GPU its gradients."""
    has_gradient = device.type == "cuda"  # FlexAttention has no backward on the CPU
    options = {"device": device, "dtype": torch.bfloat16 if has_gradient else torch.float32}
    inputs = [torch.randn(1, HEADS, length, WIDTH, **options, requires_grad=has_gradient) for _ in range(3)]
    slope = torch.randn(1, HEADS, length, WIDTH, **options)

    def call() -> tuple[torch.Tensor, ...]:
        attended = attend(*inputs, documents, enable_gqa=False)
        return torch.autograd.grad(attended, inputs, slope) if has_gradient else (attended,)

    return captured(call, device)


def main() -> int:
    """Print one line per kind of attention, and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--document", type=int, default=512, help="typical tokens of a document")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.quick:
        print("packed.py needs a GPU")
        return 0
    length = 256 if options.quick and device.type == "cpu" else options.length
    rounds = 3 if options.quick else 10
    numbers = number_documents(make_ids(length, options.document, device))
    kinds = {"blocks": document_blocks(numbers), "mask": document_mask(numbers), "causal": None}
    print(f"{length} tokens, {int(numbers[0, -1]) + 1} documents, {HEADS} heads of {WIDTH}, {device}")
    seconds = {}
    for name, documents in kinds.items():
        seconds[name] = call_seconds(make_call(documents, length, device), device, rounds=rounds)
        print(f"{name:8} {seconds[name] * 1e3:8.3f} ms forward and backward")
    derived = call_seconds(captured(lambda: document_blocks(numbers), device), device, rounds=rounds)
    print(f"{'lists':8} {derived * 1e3:8.3f} ms once per step")
    figure("packed.attention.ms", seconds["blocks"] * 1e3, "milliseconds-forward-and-backward")
    figure("packed.attention.causal", seconds["blocks"] / seconds["causal"], "x-causal-sdpa", at_most=1)
    figure("packed.attention.mask", seconds["blocks"] / seconds["mask"], "x-dense-mask", at_most=0.5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
