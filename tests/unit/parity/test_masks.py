"""Masks of ranks: each form of random operator is recorded, and one that hides its mask is reported by module."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise.layout import Layout
from shardwise.parity.masks import compare_masks, recorded_masks
from shardwise.parity.progress import Pulse

X = torch.randn(8, 4, 6, 2)


class Call(nn.Module):
    """Applies one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def fused_attention(x):
    """Scale `x` by random numbers inside of the operator, as a fused attention kernel does."""
    return x * torch.rand(())


@pytest.fixture
def operators():
    library = torch.library.Library("parity_masks", "DEF")
    library.define("fused_attention(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("fused_attention", fused_attention, "CPU")
    yield torch.ops.parity_masks
    library._destroy()


def masks_of(function, x=X, seed=0):
    model = nn.ModuleDict({"attention": Call(function)})
    torch.manual_seed(seed)
    with recorded_masks(model, Pulse()) as masks:
        model["attention"](x)
    return masks


@pytest.mark.parametrize(
    "function",
    [
        functional.dropout,
        functional.dropout2d,
        lambda x: functional.alpha_dropout(x, training=True),
        lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: x * (torch.rand(len(x), 4, 1, 1) < 0.5).to(x.dtype),
        lambda x: x.masked_fill(torch.rand_like(x) < 0.5, 0),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
        lambda x: x + torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(0)),
    ],
    ids=["dropout", "dropout2d", "alpha", "attention", "depth", "fill", "fused", "generator"],
)
def test_each_form_of_random_operator_is_compared_under_data_and_tensor_parallelism(function):
    (mask,) = masks_of(function)
    (other,) = masks_of(function, x=X + 1)
    assert mask.module == "attention"
    assert mask.digest == other.digest != ""
    assert None not in {mask.input, other.input}
    assert mask.input != other.input
    (finding,) = compare_masks([[mask], [other]], Layout(tp=2)).findings
    assert finding.cause == "equal dropout seeds across tensor-parallel ranks"
    (finding,) = compare_masks([[mask], [other]], Layout(shard=2)).findings
    assert finding.cause == "equal dropout seeds across data-parallel ranks"
    assert compare_masks([[mask], [mask]], Layout(tp=2)).findings == ()


def test_attention_without_dropout_and_masks_of_few_bits_are_not_compared():
    assert masks_of(lambda x: functional.scaled_dot_product_attention(x, x, x)) == []
    (mask,) = masks_of(functional.dropout, x=torch.ones(16))
    assert compare_masks([[mask], [mask]], Layout(replicate=2)).findings == ()


def test_a_kernel_that_hides_its_mask_is_reported_with_the_module_and_the_line_to_write(operators):
    masks = masks_of(operators.fused_attention)
    report = compare_masks([masks, masks], Layout(replicate=2))
    assert report.findings == ()
    assert "attention samples inside of fused_attention, which was not compared" in report.note
    assert report.note.endswith("call it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")


def test_a_mask_without_an_activation_is_reported_under_tensor_parallelism_alone():
    masks = masks_of(lambda x: torch.rand(40))
    assert compare_masks([masks, masks_of(lambda x: torch.rand(40), seed=1)], Layout(replicate=2)).note == ""
    report = compare_masks([masks, masks], Layout(tp=2))
    assert report.note.startswith("; attention calls rand without an activation, which was not compared across ranks")
