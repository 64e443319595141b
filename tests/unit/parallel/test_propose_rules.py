"""Tensor rules proposed: what is read from the flow of activations, and what a rehearsed split rules out."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from refusals import refuses
from shardwise.parallel.propose_rules import propose_rules, propose_splits

WIDTH, HEADS = 12, 4
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))
QKV = {"a": "column", "b": "column", "c": "column", "d": "row"}
WHOLE_BETWEEN = {"column": "column_gathered", "row": "row_split"}


def run(model):
    return model(X)


def attend(q, k, v):
    return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


class Separate(nn.Module):
    """Names reveal nothing, and the output projection is defined first."""

    def __init__(self, heads=HEADS):
        super().__init__()
        self.num_heads, self.head_dim = heads, WIDTH // heads
        self.d, self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads_of(self, x):
        return x.view(*x.shape[:2], self.num_heads, self.head_dim)

    def forward(self, x):
        return self.d(attend(self.heads_of(self.a(x)), self.heads_of(self.b(x)), self.heads_of(self.c(x))).flatten(2))


class ByShape(Separate):
    """Heads are read from the tensor."""

    def heads_of(self, x):
        return x.unflatten(-1, (-1, self.head_dim))


class WholeWidth(Separate):
    """Takes the width of the heads from its input, which is whole."""

    def heads_of(self, x):
        return x.view(*x.shape[:2], self.num_heads, WIDTH // self.num_heads)


class Packed(nn.Module):
    """All queries, then all keys, then all values."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.o(attend(*(each.unflatten(-1, (-1, 3)) for each in self.qkv(x).chunk(3, -1))).flatten(2))


class PackedByHead(Packed):
    """Query, key and value of one head, then those of the next."""

    def forward(self, x):
        return self.o(attend(*self.qkv(x).unflatten(-1, (-1, 9)).chunk(3, -1)).flatten(2))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.three(silu(self.one(x)) * self.two(x))


class PackedGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.three = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.three(silu(gate) * up)


class Scaled(nn.Module):
    """A parameter of its own stands between the two."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.one, self.two = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.two(self.one(x).relu() * self.scale)


class Shown(Scaled):
    """Hands out what should stay inside, too."""

    def forward(self, x):
        inner = self.one(x).relu()
        return self.two(inner), inner


class Normed(Scaled):
    """Normalises over what would be sharded."""

    def forward(self, x):
        return self.two(nn.functional.layer_norm(self.one(x), (8,)))


class Stack(nn.Module):
    def __init__(self, make, tie=False):
        super().__init__()
        self.embed, self.where = nn.Embedding(61, WIDTH), nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(WIDTH, 61, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.where(torch.arange(5))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def on_tokens(model):
    return model(torch.arange(10).view(2, 5))


GATHERED = {name: WHOLE_BETWEEN[style] for name, style in QKV.items()}
PROPOSALS = {
    "heads in the shape": (ByShape, QKV),
    "heads in an attribute": (Separate, QKV | {"": "heads"}),
    "width of the input": (WholeWidth, GATHERED),
    "heads that two does not divide": (lambda: Separate(heads=3), GATHERED),
    "packed one after the other": (Packed, {"qkv": "column_gathered", "o": "row_split"}),
    "packed by head": (PackedByHead, {"qkv": "column", "o": "row"}),
    "gate": (Gate, {"one": "column", "two": "column", "three": "row"}),
    "packed gate": (PackedGate, {"both": "column_gathered", "three": "row_split"}),
    "parameter in between": (Scaled, {"one": "column_gathered", "two": "row_split"}),
    "output that others read": (Shown, {"one": "column_gathered", "two": "row_split"}),
    "norm in between": (Normed, {"one": "column_gathered", "two": "row_split"}),
    "one linear": (lambda: nn.Linear(WIDTH, 4), {}),
    "three in a row": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 6)),
        {"0": "column", "2": "row"},
    ),
}


@pytest.mark.parametrize(("make", "wanted"), PROPOSALS.values(), ids=PROPOSALS)
def test_rules_follow_the_flow_of_activations(make, wanted):
    assert propose_rules(make(), run) == wanted


def test_every_part_has_a_weaker_way_that_keeps_activations_whole():
    (split,) = propose_splits(ByShape(), run)
    assert split.name == "d"
    assert split.options == (QKV, GATHERED)


def test_three_ranks_fit_where_two_do_not():
    assert propose_rules(Separate(heads=3), run, degree=3) == QKV | {"": "heads"}


def test_blocks_share_a_pattern_and_numbered_linears_keep_their_number():
    model = Stack(lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)))
    rules = propose_rules(model, on_tokens)
    assert rules == {"blocks.*.0": "column", "blocks.*.2": "row", "embed": "vocab", "head": "column_gathered"}


def test_a_stream_without_norms_joins_no_two_blocks():
    rules = propose_rules(Stack(Gate, tie=True), on_tokens)
    block = {"blocks.*.one": "column", "blocks.*.two": "column", "blocks.*.three": "row"}
    assert rules == block | {"embed": "vocab", "head": "column_gathered"}


def test_all_embeddings_that_share_a_sharded_weight_are_sharded():
    model = Stack(Gate, tie=True)
    model.unused = nn.Embedding(61, WIDTH)
    model.unused.weight = model.embed.weight
    rules = propose_rules(model, on_tokens)
    assert [name for name, style in rules.items() if style == "vocab"] == ["embed", "unused"]


def test_a_model_on_meta_gives_the_same_rules_and_is_left_there():
    with torch.device("meta"):
        model = Stack(Separate)
    assert propose_rules(model, on_tokens) == propose_rules(Stack(Separate), on_tokens)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {block.num_heads for block in model.blocks} == {HEADS}


def test_recurrent_layers_are_not_sharded():
    assert propose_rules(nn.LSTM(WIDTH, 8), run) == {}


def test_a_model_that_does_not_run_is_refused_with_its_message():
    with refuses("model.trial-run-failed", "Linear", "RuntimeError: mat1"):
        propose_rules(nn.Linear(3, 3), run)


def test_a_model_without_example_is_refused():
    with refuses("model.no-example-inputs", "ByShape"):
        propose_rules(ByShape())


def test_transformers_gpt2_packs_its_attention_and_opt_counts_heads():
    transformers = pytest.importorskip("transformers")
    tokens = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, **tokens))
    rules = propose_rules(gpt2)
    assert rules["transformer.h.*.attn.c_attn"] == "column_gathered"
    assert rules["transformer.h.*.mlp.c_fc"] == "column"
    assert (rules["transformer.wte"], rules["lm_head"]) == ("vocab", "column_gathered")
    shape = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 2}
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(num_attention_heads=4, **shape, **tokens))
    rules = propose_rules(opt)
    assert rules["model.decoder.layers.*.self_attn"] == "heads"
    assert rules["model.decoder.layers.*.self_attn.out_proj"] == "row"
