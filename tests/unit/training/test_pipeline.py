"""The pipeline step on real ranks against a plain loop in one process, in fp64."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
import shardwise.training.step.pipeline_schedule  # 1 s, once, before ranks are forked
from refusals import refuses
from shardwise.data.cursor import Cursor
from shardwise.data.feed import MicroBatch, StepBatch
from shardwise.layout import Layout
from shardwise.models import decoder
from shardwise.parallel.apply import MeshContext
from shardwise.parallel.gradsync import NoSync
from shardwise.parallel.optimizer import Optimized
from shardwise.parallel.recompute import find_blocks, recompute_block
from shardwise.parallel.stages import count_layers, find_layers, split_stages
from shardwise.plans import Plan
from shardwise.plans.catalogue import DecoderConfig
from shardwise.plans.pipeline import SCHEDULES, check_pipeline, split_layers
from shardwise.plans.sections import Pipeline
from shardwise.testing import run_ranks
from shardwise.training.loading import Length
from shardwise.training.step.pipeline import PipelineStep
from shardwise.training.step.step import Autocast, StepParts, StepSource
from shardwise.training.step.update import Updated

VOCAB, TOKENS, ROWS = 13, 6, 2


class Moved:
    """The optimizer step, unscaled and unclipped."""

    def scale(self, loss):
        return loss

    def __call__(self, optimizer):
        optimizer.step()
        return Updated(None, 0.0)


def loss_sum(output, batch):
    return functional.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="sum")


def a_job(forward=None):
    return sw.Job(
        model=nn.Identity,
        data=lambda _: None,
        loss=sw.Loss(sum=loss_sum, count=lambda batch: batch[1].numel()),
        optimizer=sw.adamw(lr=1e-2),
        batch_size=1,
        steps=3,
        **({} if forward is None else {"forward": forward}),
    )


def three_steps(accumulation, short=True, tokens=(TOKENS,) * 3):
    """Steps of random tokens; the last has a padding row first and, where it fits, a batch of padding only."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for number, length in enumerate(tokens):
        rows = [ROWS] * accumulation
        if short and number == 2:
            rows[0] = ROWS - 1
            rows[-1] = 0 if accumulation > 1 else rows[-1]
        batches = [torch.randint(0, VOCAB, (ROWS, length + 1), generator=generator) for _ in rows]
        micro = [MicroBatch((b[:, :-1], b[:, 1:]), r, ROWS) for b, r in zip(batches, rows, strict=True)]
        steps.append(StepBatch(micro, sum(rows) * length, sum(rows), Cursor(seed=0)))
    return steps


def in_one_process(make, steps, job, autocast=None):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in steps:
        total = 0.0
        for micro in step.micro_batches:
            batch = tuple(part[: micro.rows] for part in micro.batch)
            if micro.rows:
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
                    loss = job.loss.sum(job.forward(model, batch), batch)
                (loss / step.denominator).backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def on_a_rank(world, *, make, plan, steps, job, prepare, autocast):
    torch.manual_seed(0)
    model = make()
    layers = find_layers(model)
    num_layers = count_layers(model, layers)
    check_pipeline(plan, num_layers)
    split = split_layers(plan, num_layers)
    stages = split_stages(model, split, world.rank, layers=layers, device=world.device)
    for stage in stages if prepare is not None else ():
        prepare(stage)
    parts = StepParts(
        source=StepSource(job, plan, world),
        optimized=Optimized(
            optimizer=torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=1e-2), named=[]
        ),
        feed=None,
        sync=NoSync(),
        update=Moved(),
        autocast=Autocast(device_type="cpu", dtype=autocast),
        length=Length(num_steps=len(steps), steps_per_epoch=None, source="test"),
    )
    mesh = world.mesh(plan.layout)
    place = MeshContext(device=world.device, layout=plan.layout, rank=world.rank, mesh=mesh, dp_group=None)
    step = PipelineStep(job, stages, parts, split=split, plan=plan, mesh_context=place)
    losses = [step(batch).loss_sum.item() for batch in steps]
    measured = step.measure(steps[-1].micro_batches[0], {"loss": job.loss})
    return losses, {name: parameter.detach() for name, parameter in step.named_parameters()}, measured


def in_a_pipeline(make, steps, job, *, schedule="1f1b", nproc=2, split=(), prepare=None, autocast=None):
    plan = Plan(
        layout=Layout(pp=nproc),
        micro_batch=ROWS,
        accumulation=len(steps[0].micro_batches),
        pipeline=Pipeline(schedule=schedule, split=split),
    )
    ranks = run_ranks(on_a_rank, nproc, make=make, plan=plan, steps=steps, job=job, prepare=prepare, autocast=autocast)
    losses = [sum(parts) for parts in zip(*(rank[0] for rank in ranks), strict=True)]
    parameters = {name: value for rank in ranks for name, value in rank[1].items()}
    assert len(parameters) == sum(len(rank[1]) for rank in ranks)
    return losses, parameters, [rank[2] for rank in ranks if rank[2]]


def assert_equal(make, *, accumulation=4, job=None, **options):
    job, steps = job or a_job(), three_steps(accumulation)
    losses, parameters = in_one_process(make, steps, job)
    found, pieces, _ = in_a_pipeline(make, steps, job, **options)
    assert found == pytest.approx(losses, rel=1e-9)
    assert pieces.keys() == parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(pieces[name], value, rtol=1e-9, atol=1e-9, msg=name)


def small(family="llama", num_layers=5, **changes):
    config = {"vocab_size": VOCAB, "context": 8, "width": 8, "num_heads": 2, "mlp_width": 12} | changes
    return decoder(DecoderConfig(family=family, num_layers=num_layers, **config)).double()


@pytest.mark.representative("1f1b", "zbv", "dualpipev")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_llama_in_two_stages_trains_as_in_one_process(schedule):
    assert_equal(small, schedule=schedule)


@pytest.mark.representative("interleaved_zero_bubble")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv"])
def test_llama_on_four_ranks_trains_as_in_one_process(schedule):
    assert_equal(partial(small, num_layers=9), schedule=schedule, nproc=4)


@pytest.mark.representative("gpipe-1", "1f1b-5")
@pytest.mark.parametrize(("schedule", "accumulation"), [("gpipe", 1), ("1f1b", 2), ("1f1b", 5), ("zbv", 5)])
def test_gpt2_trains_the_same_whatever_the_accumulation(schedule, accumulation):
    assert_equal(partial(small, "gpt2"), schedule=schedule, accumulation=accumulation)


@pytest.mark.representative("1f1b-split0", "interleaved_1f1b-split2")
@pytest.mark.parametrize(("schedule", "split"), [("1f1b", (1,)), ("1f1b", (4,)), ("interleaved_1f1b", (1, 2, 4))])
def test_uneven_split_trains_as_in_one_process(schedule, split):
    assert_equal(small, schedule=schedule, split=split)


@pytest.mark.representative("True")
@pytest.mark.parametrize("selective", [False, True])
def test_recomputed_blocks_train_as_in_one_process(selective):
    def prepare(stage):
        for block in find_blocks(stage).values():
            recompute_block(block, selective=selective)

    assert_equal(small, prepare=prepare)


@pytest.mark.prove
def test_compiled_blocks_train_as_in_one_process():
    def prepare(stage):
        for block in find_blocks(stage).values():
            block.compile(backend="aot_eager")

    assert_equal(small, prepare=prepare)


class Rich(nn.Module):
    """A block that takes three tensors and returns two and None."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, mask, *, extra):
        hidden = torch.tanh(self.first(x)) * mask + extra
        return x + self.second(hidden), hidden, None


class RichModel(nn.Module):
    """Uses both tensors of each block in the next, and changes one of them in between."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(Rich() for _ in range(4))
        self.head = nn.Linear(8, VOCAB)
        self.register_buffer("mask", torch.linspace(0.5, 1.5, TOKENS)[:, None])
        self.double()

    def forward(self, tokens):
        x = self.embed(tokens)
        hidden = torch.zeros_like(x)
        for layer in self.layers:
            x, hidden, _ = layer(x + 0.1 * hidden, self.mask, extra=(tokens % 3)[..., None].double())
            x = 0.9 * x
        return self.head(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_blocks_with_several_tensors_in_and_out_train_as_in_one_process(schedule):
    assert_equal(RichModel, schedule=schedule)


def transformer(name):
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": VOCAB, "num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    shape |= {"max_position_embeddings": 16, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    grouped = shape | {"num_key_value_heads": 1, "intermediate_size": 12}
    window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2}
    make = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **dropout)),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**grouped, **window)),
    }[name]
    return lambda: make().double()


def masked_logits(model, batch):
    return model(input_ids=batch[0], attention_mask=torch.ones_like(batch[0])).logits


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_transformers_decoder_trains_as_in_one_process(name):
    assert_equal(transformer(name), accumulation=2, job=a_job(masked_logits))


def test_sequences_may_be_of_another_length_in_every_step():
    steps, job = three_steps(2, tokens=(6, 4, 8)), a_job()
    losses, _ = in_one_process(small, steps, job)
    assert in_a_pipeline(small, steps, job)[0] == pytest.approx(losses, rel=1e-9)


def test_bf16_travels_and_trains_close_to_one_process():
    make, steps, job = (lambda: small().float()), three_steps(2), a_job()
    losses, _ = in_one_process(make, steps, job, torch.bfloat16)
    assert in_a_pipeline(make, steps, job, autocast=torch.bfloat16)[0] == pytest.approx(losses, rel=1e-2)


@pytest.mark.representative("zbv")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_measures_cover_the_real_rows_and_only_the_last_stage_reports_them(schedule):
    steps, job = three_steps(2), a_job()
    _, parameters = in_one_process(small, steps, job)
    model = small()
    model.load_state_dict(parameters)
    micro = steps[-1].micro_batches[0]
    batch = tuple(part[: micro.rows] for part in micro.batch)
    expected = {"loss": loss_sum(model(batch[0]), batch).item(), "loss/count": TOKENS}
    assert in_a_pipeline(small, steps, job, schedule=schedule)[2] == [pytest.approx(expected)]


def test_micro_batches_of_different_shapes_are_refused():
    steps = three_steps(2)
    short = MicroBatch(tuple(part[:1] for part in steps[0].micro_batches[1].batch), 1, 1)
    steps[0] = StepBatch([steps[0].micro_batches[0], short], 18, 3, Cursor(seed=0))
    with refuses("support.pipeline-micro-batch-shapes"):
        in_a_pipeline(small, steps, a_job())


class Skipping(nn.Module):
    """Adds a parameter from before the layers after them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(Rich() for _ in range(2))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens):
        x = start = self.embed(tokens)
        for layer in self.layers:
            x, _, _ = layer(x, 1.0, extra=0.0)
        return self.head(x + start)


def test_model_that_carries_a_value_around_its_layers_is_refused():
    with refuses("support.pipeline-foreign-parameter", "stage 1"):
        in_a_pipeline(Skipping, three_steps(2), a_job())


class Misplaced(Skipping):
    """Registers behind the layers what it uses in front of them, as BART does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        for layer in self.layers:
            x, _, _ = layer(x, 1.0, extra=0.0)
        return self.head(x)


def test_part_behind_the_layers_that_is_used_in_front_of_them_is_refused():
    with refuses("support.pipeline-foreign-parameter", "stage 0", "norm"):
        in_a_pipeline(Misplaced, three_steps(2), a_job())


class Reading(Misplaced):
    """Reads the weight of such a part without calling it, as DeBERTa does."""

    def forward(self, tokens):
        x = self.embed(tokens) * self.norm.weight
        for layer in self.layers:
            x, _, _ = layer(x, 1.0, extra=0.0)
        return self.head(x)


def test_weight_behind_the_layers_that_is_read_in_front_of_them_is_refused():
    with refuses("support.pipeline-foreign-parameter", "stage 0"):
        in_a_pipeline(Reading, three_steps(2), a_job())
