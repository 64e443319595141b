"""Which models can run on slices of their sequences."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from refusals import refuses
from shardwise import models
from shardwise.layout import Layout
from shardwise.parallel.context import check_context


class Model(nn.Module):
    """Takes positions; `parts` are its modules, the rest is its config."""

    def __init__(self, parts=None, **config):
        super().__init__()
        self.parts = nn.ModuleDict(parts or {})
        self.config = SimpleNamespace(**config)

    def forward(self, tokens, position_ids=None):  # noqa: ARG002 - what context parallelism hands in
        return tokens


class Unplaced(nn.Module):
    def forward(self, tokens):
        return tokens


REFUSED = {
    "heads": (
        lambda: Model(num_attention_heads=6),
        Layout(cp=4),
        ("plan.cp-heads-not-divisible", "cp=4", "6 attention heads", "Model", "1 or 2 or 3 or 6"),
    ),
    "heads sharded by tp": (
        lambda: Model(n_head=4),
        Layout(cp=4, tp=2),
        ("plan.cp-heads-not-divisible", "cp=4 x tp=2", "4 attention heads", "1 or 2"),
    ),
    "no positions": (Unplaced, Layout(cp=2), ("support.cp-no-position-ids", "Unplaced.forward")),
    "convolution": (
        lambda: Model({"mix": nn.Conv1d(2, 2, 3)}),
        Layout(cp=2),
        ("support.cp-mixes-tokens", "parts.mix", "Conv1d"),
    ),
    "positions from padding": (
        lambda: Model({"position": nn.Embedding(4, 2, padding_idx=0)}),
        Layout(cp=2),
        ("support.cp-positions-from-padding", "parts.position"),
    ),
    "another kernel": (
        lambda: Model(_attn_implementation="eager"),
        Layout(cp=2),
        ("support.cp-without-sdpa", "'eager'", "sdpa"),
    ),
    "window": (lambda: Model(sliding_window=8), Layout(cp=2), ("support.cp-partial-attention", "sliding_window")),
    "some windows": (
        lambda: Model(layer_types=["full_attention", "conv"]),
        Layout(cp=2),
        ("support.cp-partial-attention", "(conv)"),
    ),
    "balanced experts": (lambda: Model(output_router_logits=True), Layout(cp=2), ("support.cp-expert-balancing",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_slices_would_change_is_refused(case):
    make, layout, refusal = REFUSED[case]
    with refuses(*refusal):
        check_context(make(), layout, own_loss=False)


def test_a_loss_that_may_not_add_up_is_refused():
    with refuses("support.cp-loss-inside-model"):
        check_context(Model(), Layout(cp=2), own_loss=True)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_decoders_are_accepted(name):
    with torch.device("meta"):
        check_context(models.decoder(name), Layout(cp=4), own_loss=False)
