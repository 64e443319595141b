"""Rules of tensor parallelism: where they come from, what they mean, and what is refused before anything starts."""

import pytest
import torch
from torch import nn

from refusals import refuses
from shardwise import models
from shardwise.parallel.tensor_rules import check_tensor, find_rules, matches

MLP_RULES = {"blocks.*.up": "column", "blocks.*.down": "row"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 10, bias=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 3
        self.q = nn.Linear(12, 12)
        self.o = nn.Linear(12, 12)


def tiny(transformers, name, **options):
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 61,
        "pad_token_id": None,
    }
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**shape | options))


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("blocks.*.up", "blocks.12.up", True),
        ("blocks.*.up", "blocks.1.mlp.up", False),
        ("blocks.*", "blocks.1.up", False),
        ("head", "head", True),
        ("head", "head.out", False),
    ],
)
def test_a_star_stands_for_one_part_of_a_name(pattern, name, fits):
    assert matches(pattern, name) == fits


def test_the_jobs_rules_come_before_the_models_own():
    own = {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}
    assert find_rules(models.decoder("gpt2-tiny"), own) == own


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_a_decoder_inside_another_module_keeps_its_rules_under_its_name(name):
    model = models.decoder(name)
    outer = nn.ModuleDict({"inner": model})
    assert find_rules(outer, None) == {f"inner.{key}": style for key, style in model.tensor_rules().items()}


def test_transformers_plan_is_translated_to_our_rules():
    llama = tiny(pytest.importorskip("transformers"), "Llama")
    rules = find_rules(llama, None)
    assert rules["model.layers.*.self_attn.q_proj"] == "column"
    assert rules["model.layers.*.mlp.down_proj"] == "row"
    assert rules["lm_head"] == "column_gathered"
    assert rules["model.layers.*.input_layernorm"] == "sequence"


def test_head_norms_of_qwen3_are_summed_over_ranks():
    rules = find_rules(tiny(pytest.importorskip("transformers"), "Qwen3"), None)
    assert rules["model.layers.*.self_attn.q_norm"] == "summed"


def test_an_embedding_tied_to_a_sharded_head_is_sharded_with_it():
    rules = find_rules(tiny(pytest.importorskip("transformers"), "Qwen2", tie_word_embeddings=True), None)
    assert (rules["model.embed_tokens"], rules["lm_head"]) == ("vocab", "column_gathered")


def test_an_embedding_of_its_own_class_stays_whole_with_its_head():
    rules = find_rules(tiny(pytest.importorskip("transformers"), "Gemma2", head_dim=8), None)
    assert not {"model.embed_tokens", "lm_head"} & set(rules)


def test_a_style_of_transformers_that_is_not_supported_is_named():
    transformers = pytest.importorskip("transformers")
    with refuses("support.tp-style", "MixtralForCausalLM", "model.layers"):
        find_rules(tiny(transformers, "Mixtral"), None)


def test_a_model_that_declares_nothing_is_refused_with_an_example():
    with refuses("support.tp-no-rules", "Net", 'tensor_rules={"blocks'):
        find_rules(Net(), None)


def test_transformers_gpt2_declares_nothing_and_is_refused():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=61))
    with refuses("support.tp-no-rules", "GPT2LMHeadModel"):
        find_rules(model, None)


@pytest.mark.parametrize(
    ("rules", "refusal"),
    [
        ({"blocks.*.upp": "column"}, ("job.tensor-rule-unmatched", "'blocks.*.upp'", "'blocks.*.up'")),
        ({"blocks.*.up": "colum"}, ("job.tensor-rule-style", "'colum'", "'column'")),
        ({"blocks.*.norm": "column"}, ("job.tensor-rule-not-linear", "blocks.0.norm", "LayerNorm")),
        ({"blocks.*.up": "vocab"}, ("job.tensor-rule-not-embedding", "blocks.0.up")),
        ({"blocks.*.up": "column", "blocks.0.up": "row"}, ("job.tensor-rules-overlap", "blocks.0.up")),
    ],
)
def test_a_rule_that_does_not_fit_is_refused_by_name(rules, refusal):
    with refuses(*refusal):
        find_rules(Net(), rules)


def test_an_embedding_that_reads_all_rows_cannot_be_sharded():
    net = Net()
    net.embed = nn.Embedding(10, 6, max_norm=1.0)
    with refuses("job.tensor-rule-not-embedding", "max_norm"):
        find_rules(net, {"embed": "vocab"})


def test_a_degree_that_does_not_divide_the_heads_names_those_that_do():
    model = models.decoder("gpt2-tiny")
    with refuses("plan.tp-not-divisible", "tp=3", "4 heads", "blocks.*.attn.qkv", "1, 2 or 4"):
        check_tensor(model, 3, model.tensor_rules())


def test_a_degree_beyond_the_key_value_heads_is_refused():
    model = models.decoder("llama-tiny", num_kv_heads=2)
    with refuses("plan.tp-not-divisible", "tp=4", "2 key and value heads", "1 or 2"):
        check_tensor(model, 4, model.tensor_rules())


def test_heads_of_transformers_models_are_checked():
    model = tiny(pytest.importorskip("transformers"), "Llama")
    with refuses("plan.tp-not-divisible", "tp=4", "2 key and value heads"):
        check_tensor(model, 4, find_rules(model, None))


def test_heads_that_an_attention_module_counts_itself_are_checked():
    net = nn.ModuleDict({"attn": Attention()})
    with refuses("plan.tp-not-divisible", "3 heads", "attn.q", "1 or 3"):
        check_tensor(net, 2, {"attn.q": "column", "attn.o": "row"})


def test_heads_that_a_rule_divides_are_checked_whatever_the_modules_name():
    net = nn.ModuleDict({"mixing": Attention()})
    with refuses("plan.tp-not-divisible", "tp=2", "mixing.num_heads", "is 3", "1 or 3"):
        check_tensor(net, 2, {"mixing": "heads", "mixing.q": "column", "mixing.o": "row"})


def test_a_degree_that_does_not_divide_a_width_is_refused():
    with refuses("plan.tp-not-divisible", "tp=5", "12 outputs", "blocks.0.up", "2, 3, 4 or 6"):
        check_tensor(Net(), 5, MLP_RULES)


def test_a_vocabulary_may_be_sharded_unevenly():
    model = models.decoder("gpt2-tiny", vocab_size=257)
    check_tensor(model, 2, model.tensor_rules(), sequence=True)


def test_a_shared_weight_sharded_in_two_ways_is_refused():
    net = Net()
    net.head.weight = net.embed.weight
    with refuses("job.tensor-rules-tied", "embed.weight", "head.weight"):
        check_tensor(net, 2, MLP_RULES | {"head": "column_gathered"})


def test_sequence_parallelism_without_norms_in_the_rules_is_refused():
    with refuses("job.tensor-rule-sequence", "no norm"):
        check_tensor(Net(), 2, MLP_RULES, sequence=True)


def test_sequence_parallelism_needs_a_rule_for_all_of_a_block():
    rules = {"blocks.*.norm": "sequence", "blocks.*.up": "column"}
    with refuses("job.tensor-rule-missing", "blocks.0.down"):
        check_tensor(Net(), 2, rules, sequence=True)
