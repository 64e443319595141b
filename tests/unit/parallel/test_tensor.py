"""Tensor parallelism trains as one process does: in fp64, with every style, alone and under FSDP2."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from refusals import refuses
from shardwise import models
from shardwise.parallel.stages import split_stages
from shardwise.parallel.tensor import tensor_parallel
from shardwise.parallel.tensor_rules import find_rules
from shardwise.plans.pipeline import StageSplit
from shardwise.testing import run_ranks

DECODERS = {
    "gpt2 tied": ("gpt2-tiny", {}),
    "gpt2 untied, odd vocabulary": ("gpt2-tiny", {"tie_head": False, "vocab_size": 257}),
    "llama": ("llama-tiny", {}),
    "llama tied, grouped heads": ("llama-tiny", {"tie_head": True, "num_kv_heads": 2}),
}


@dataclass
class Outcome:
    losses: list[float]
    output: Tensor
    grads: dict[str, Tensor]
    """Of the first step."""
    weights: dict[str, Tensor]


def shaken(model):
    """In fp64, with a spread in every parameter: zero biases and unit norms would hide mistakes."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model, batch, loss_of, *, after_backward=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses, grads, output = [], {}, None
    for _ in range(3):
        output = model(batch)
        loss = loss_of(output)
        optimizer.zero_grad()
        loss.backward()
        after_backward()
        if not grads:
            grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return Outcome(losses, output.detach(), grads, {name: whole(p) for name, p in model.named_parameters()})


def on_ranks(model, batch, loss_of, *, rules=None, sequence=False, degree=2):
    """Train on `degree` tp ranks; every gradient must have its parameter's placement."""
    found = find_rules(model, rules)

    def body(world):
        mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",))
        parallel = tensor_parallel(copy.deepcopy(model), mesh, found, sequence=sequence)

        def check():
            for name, p in parallel.named_parameters():
                assert p.grad.placements == p.placements, name

        return train(parallel, batch, loss_of, after_backward=check)

    return run_ranks(body, degree)


def assert_equal(ours, theirs, tolerance=1e-9):
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    torch.testing.assert_close(ours.output, theirs.output, rtol=tolerance, atol=tolerance)
    for field in ("grads", "weights"):
        mine, reference = getattr(ours, field), getattr(theirs, field)
        assert mine.keys() == reference.keys()
        for name, value in mine.items():
            torch.testing.assert_close(
                value, reference[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_equal_to_one_process(model, batch, loss_of, **options):
    alone = train(copy.deepcopy(model), batch, loss_of)
    for outcome in on_ranks(model, batch, loss_of, **options):
        assert_equal(outcome, alone)


def next_token(tokens):
    return lambda logits: functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def decoder(kind):
    name, options = DECODERS[kind]
    model = shaken(models.decoder(name, **options))
    return model, torch.randint(model.config.vocab_size, (4, 17))


@pytest.mark.representative("True-gpt2 untied, odd vocabulary", "False-gpt2 tied", "True-llama tied, grouped heads")
@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("sequence", [False, True])
def test_decoder_trains_as_on_one_process(kind, sequence):
    model, tokens = decoder(kind)
    assert_equal_to_one_process(model, tokens[:, :-1], next_token(tokens), sequence=sequence)


@pytest.mark.representative("True")
@pytest.mark.parametrize("sequence", [False, True])
def test_decoder_on_four_ranks_trains_as_on_one_process(sequence):
    model, tokens = decoder("gpt2 untied, odd vocabulary")
    assert_equal_to_one_process(model, tokens[:, :-1], next_token(tokens), sequence=sequence, degree=4)


@pytest.mark.representative("True-Qwen2", "False-Phi3")
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Phi3"])
@pytest.mark.parametrize("sequence", [False, True])
def test_transformers_model_trains_as_on_one_process_by_its_own_plan(name, sequence):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        pad_token_id=7,
        eos_token_id=None,
        tie_word_embeddings=name == "Qwen2",
    )
    model = shaken(Logits(getattr(transformers, f"{name}ForCausalLM")(config)))
    tokens = torch.randint(61, (2, 17))
    tokens[0, 3] = config.pad_token_id  # whose embedding gets no gradient
    assert_equal_to_one_process(model, tokens[:, :-1], next_token(tokens), sequence=sequence)


class Logits(nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, tokens):
        return self.lm(input_ids=tokens).logits


class Encoder(nn.Module):
    """Post-norm attention and MLP with biases, a class token and a scale of the root's own."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.classes = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), 1, 8), x], dim=1)
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.first(x + self.o(mixed))
        x = self.second(x + self.mlp(x))
        return self.classes(x[:, 0])


ENCODER_RULES = {"q": "column", "k": "column", "v": "column", "o": "row", "mlp.0": "column", "mlp.2": "row"}


@pytest.mark.parametrize("rules", [ENCODER_RULES, ENCODER_RULES | {"classes": "column_gathered"}])
def test_a_users_model_trains_by_the_jobs_rules(rules):
    model = shaken(Encoder())
    batch, target = torch.randn(5, 6, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    assert_equal_to_one_process(model, batch, lambda out: functional.cross_entropy(out, target), rules=rules)


def test_transformers_gpt2_trains_by_rules_for_its_transposed_linear_modules():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=32, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    model = shaken(Logits(transformers.GPT2LMHeadModel(config)))
    tokens = torch.randint(61, (2, 17))
    rules = {"lm.transformer.h.*.mlp.c_fc": "column", "lm.transformer.h.*.mlp.c_proj": "row"}
    assert_equal_to_one_process(model, tokens[:, :-1], next_token(tokens), rules=rules)


@pytest.mark.representative("True-gpt2 untied, odd vocabulary", "False-gpt2 tied")
@pytest.mark.parametrize("kind", ["gpt2 tied", "gpt2 untied, odd vocabulary", "llama tied, grouped heads"])
@pytest.mark.parametrize("sequence", [False, True])
def test_meta_built_decoder_under_fsdp_and_tp_trains_as_on_one_process(kind, sequence):
    model, tokens = decoder(kind)
    alone = train(copy.deepcopy(model), tokens[:, :-1], next_token(tokens))
    state, config = model.state_dict(), model.config

    def body(world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        with torch.device("meta"):
            parallel = models.decoder(config).double()
        tensor_parallel(parallel, mesh["tp"], parallel.tensor_rules(), sequence=sequence)
        assert (parallel.head.weight is parallel.embed.weight) == config.tie_head
        for block in [*parallel.blocks, parallel]:
            fully_shard(block, mesh=mesh["shard"])
        parallel.to_empty(device="cpu")
        parallel.init_weights()  # ties the head again
        with torch.no_grad():
            for name, p in parallel.named_parameters():
                p.copy_(distribute_tensor(state[name], p.device_mesh, p.placements, src_data_rank=None))
        part = tokens[mesh.get_local_rank("shard") :: 2]
        outcome = train(parallel, part[:, :-1], next_token(part))
        losses = torch.tensor(outcome.losses, dtype=torch.float64)
        dist.all_reduce(losses, group=mesh.get_group("shard"))
        return (losses / 2).tolist(), outcome.grads, outcome.weights

    for losses, grads, weights in run_ranks(body, 4):
        assert_equal(Outcome(losses, alone.output, grads, weights), alone)


@pytest.mark.parametrize("sequence", [False, True])
def test_stages_of_a_pipeline_are_sharded_by_the_rules_of_the_whole_model(sequence):
    model = shaken(models.decoder("gpt2-tiny", tie_head=False))
    tokens = torch.randint(256, (2, 17))
    alone = train(copy.deepcopy(model), tokens[:, :-1], next_token(tokens))
    split = StageSplit(bounds=(0, 1, 2), ranks=(0, 1))

    def body(world):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        stages = []
        for rank in range(2):
            (stage,) = split_stages(copy.deepcopy(model), split, rank, layers="blocks", device=torch.device("cpu"))
            tensor_parallel(stage, mesh, model.tensor_rules(), sequence=sequence).connect()
            stage.program = lambda module: module(tokens[:, :-1])
            stages.append(stage)
        sent = stages[0]()
        stages[1].incoming = stages[0].outgoing
        next_token(tokens)(stages[1](*sent)).backward()
        return {name: whole(p.grad) for stage in stages for name, p in stage.named_parameters()}

    for grads in run_ranks(body, 2):
        assert_equal(Outcome(alone.losses, alone.output, grads, alone.weights), alone)


def test_every_rank_has_its_shard_of_weights_and_gradients():
    model, tokens = decoder("gpt2 tied")

    def body(world):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallel = tensor_parallel(copy.deepcopy(model), mesh, model.tensor_rules(), sequence=False)
        next_token(tokens)(parallel(tokens[:, :-1])).backward()
        return {
            name: (tuple(p.to_local().shape), tuple(p.grad.to_local().shape)) for name, p in parallel.named_parameters()
        }

    for shapes in run_ranks(body, 2):
        assert shapes["embed.weight"] == ((128, 64), (128, 64))
        assert shapes["blocks.0.attn.qkv.weight"] == ((96, 64), (96, 64))
        assert shapes["blocks.0.attn.out.weight"] == ((64, 32), (64, 32))
        assert shapes["blocks.0.attn.out.bias"] == ((64,), (64,))
        assert shapes["positions.weight"] == ((128, 64), (128, 64))
        assert "head.weight" not in shapes


def test_sequence_parallelism_halves_the_stream_between_the_sharded_regions():
    model, tokens = decoder("llama")

    def body(world, *, sequence):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallel = tensor_parallel(copy.deepcopy(model), mesh, model.tensor_rules(), sequence=sequence)
        seen = []
        parallel.blocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
        logits = parallel(tokens[:, :-1])
        return seen[0], type(logits), logits.shape[1]

    assert run_ranks(body, 2, sequence=False)[1] == (16, Tensor, 16)
    assert run_ranks(body, 2, sequence=True)[1] == (8, Tensor, 16)


def test_column_modules_that_read_one_activation_sum_its_gradient_once():
    model = shaken(Encoder())
    batch = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)

    def body(world):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallel = tensor_parallel(copy.deepcopy(model), mesh, ENCODER_RULES, sequence=False)
        with torch.profiler.profile() as profile:
            parallel(batch).sum().backward()
        return sum(event.name == "c10d::allreduce_" for event in profile.events())

    # Forward: after o and mlp.2; backward: before q, k, v together and before mlp.0.
    assert run_ranks(body, 2) == [4, 4]


def test_weights_come_from_the_first_rank():
    def body(world):
        torch.manual_seed(world.rank)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallel = tensor_parallel(Encoder(), mesh, ENCODER_RULES, sequence=False)
        return {name: whole(p) for name, p in parallel.named_parameters()}

    torch.manual_seed(0)
    expected = dict(Encoder().named_parameters())
    for weights in run_ranks(body, 2):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=0)


def test_frozen_parameters_stay_frozen():
    model = Encoder()
    model.q.weight.requires_grad_(False)

    def body(world):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallel = tensor_parallel(copy.deepcopy(model), mesh, ENCODER_RULES, sequence=False)
        parallel(torch.randn(2, 6, 8)).sum().backward()
        return [name for name, p in parallel.named_parameters() if p.grad is None]

    assert run_ranks(body, 2)[0] == ["q.weight"]


@pytest.mark.parametrize("token", [-1, 256])
def test_a_token_outside_a_sharded_vocabulary_is_an_error_as_on_one_process(token):
    def body(world):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = models.decoder("gpt2-tiny")
        tensor_parallel(model, mesh, model.tensor_rules(), sequence=False)
        with pytest.raises(IndexError):
            model(torch.tensor([[3, token]]))

    run_ranks(body, 2)


def test_tokens_that_do_not_divide_are_refused_under_sequence_parallelism():
    model, tokens = decoder("llama")
    with refuses("plan.sequence-not-divisible", "15 tokens", "tp=2", "16 tokens"):
        on_ranks(model, tokens[:, :15], lambda out: out.sum(), sequence=True)


class Conditioned(nn.Module):
    """Blocks that get a second input with a gradient, as in cross attention."""

    def __init__(self):
        super().__init__()
        self.condition = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(2))

    def forward(self, x):
        condition = self.condition(x)
        for block in self.blocks:
            x = block(x, condition)
        return x


class ConditionedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x, condition):
        return x + self.down(self.up(self.norm(x)) * self.up(condition))


CONDITIONED_RULES = {"blocks.*.norm": "sequence", "blocks.*.up": "column", "blocks.*.down": "row"}


def test_a_second_input_with_a_gradient_trains_as_on_one_process():
    batch = torch.randn(2, 4, 8, dtype=torch.float64)
    assert_equal_to_one_process(
        shaken(Conditioned()), batch, lambda out: out.square().mean(), rules=CONDITIONED_RULES, sequence=False
    )


def test_a_second_input_with_a_gradient_is_refused_under_sequence_parallelism():
    with refuses("support.sequence-parallel-second-gradient", "ConditionedBlock"):
        on_ranks(Conditioned(), torch.randn(2, 4, 8), lambda out: out.sum(), rules=CONDITIONED_RULES, sequence=True)


class Borrower(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.scale = nn.Linear(8, 1)

    def forward(self, x):
        return self.mlp(x) * self.scale.weight


def test_use_of_another_modules_parameter_is_refused_with_what_to_do():
    rules = {"mlp.0": "column", "mlp.2": "row"}
    with refuses("support.tp-foreign-parameter"):
        on_ranks(Borrower(), torch.randn(2, 8), lambda out: out.sum(), rules=rules)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="wrong gradients on this torch, where plans refuse it")
@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_a_block_compiles_into_one_graph(sequence):
    model, tokens = decoder("llama tied, grouped heads")
    alone = train(copy.deepcopy(model), tokens[:, :-1], next_token(tokens))

    def body(world):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallel = tensor_parallel(copy.deepcopy(model), mesh, model.tensor_rules(), sequence=sequence)
        for block in parallel.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        return train(parallel, tokens[:, :-1], next_token(tokens))

    for outcome in run_ranks(body, 2):
        assert_equal(outcome, alone)
