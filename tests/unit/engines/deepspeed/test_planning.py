"""DeepSpeed's stages in the planner: predicted state equals DeepSpeed's own tensors, and one is chosen for a reason."""

import dataclasses
import gc
import importlib.util
from contextlib import suppress

import pytest
import torch
from planner.test_search import asked
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import cross_entropy

import shardwise as sw
from shardwise.cli.main import main
from shardwise.engines.deepspeed.config import deepspeed_config
from shardwise.engines.deepspeed.planning import (
    deepspeed_at_rest,
    deepspeed_forms,
    deepspeed_memory,
    deepspeed_time,
    kept_numel,
)
from shardwise.layout import Layout
from shardwise.planner.cost.time import TimeModel
from shardwise.planner.search.engine_forms import choose_form
from shardwise.planner.search.explain import beside_native, form_reason
from shardwise.planner.search.search import search
from shardwise.planner.trace.trace import described
from shardwise.plans.plan import Plan
from shardwise.plans.sections import Communication, Offload, Precision
from shardwise.testing import run_ranks

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'shardwise[deepspeed]'"
)
RANKS = 2


def plans(*zeros, **fields):
    layouts = {0: Layout(replicate=RANKS)}
    return [
        Plan(
            engine="deepspeed",
            zero=zero,
            layout=layouts.get(zero, Layout(shard=RANKS)),
            communication=Communication(bucket_mb=0.5),
            **fields,
        )
        for zero in zeros
    ]


def tensor_bytes():
    """Bytes of all storages that tensors of this process point to."""
    sizes = {}
    for tensor in gc.get_objects():
        # Fake tensors that an earlier test of this process left have no memory, and those of vmap have no storage.
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
            with suppress(NotImplementedError):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def train_and_weigh(world, plan, job):
    """Train two steps by bare DeepSpeed, and return what its tensors take between steps."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gc.collect()
    before = tensor_bytes()
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = deepspeed_config(plan, clip_norm=None)
    for place in ("offload_optimizer", "offload_param"):
        config["zero_optimization"].get(place, {}).pop("pin_memory", None)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    tokens = torch.zeros((1, 9), dtype=torch.long)
    for _ in range(2 * plan.accumulation):
        logits = engine(tokens[:, :-1])
        engine.backward(cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()))
        engine.step()
    del tokens, logits, optimizer
    gc.collect()
    resident = tensor_bytes() - before
    del engine, model
    gc.collect()
    return resident


@pytest.fixture(scope="module")
def job():
    return sw.Job(
        model=lambda: sw.models.decoder("llama-tiny", vocab_size=256, context=64, width=128, num_layers=4),
        data=sw.datasets.text(length=64),
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=RANKS,
        steps=1,
    )


@needs_deepspeed
@pytest.mark.parametrize(
    ("compute", "stages", "offloaded"),
    [
        ("fp32", (3,), ()),
        pytest.param("fp32", (0, 1, 2, 3), (1, 2, 3), marks=pytest.mark.prove),
        pytest.param("bf16", (0, 1, 2, 3), (1, 2, 3), marks=pytest.mark.prove),
    ],
)
def test_what_a_stage_holds_between_steps_is_what_deepspeed_holds(  # noqa: PLR0917 - fixtures
    job, compute, stages, offloaded, tmp_path, monkeypatch
):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    precision = Precision(compute=compute)
    tried = plans(*stages, precision=precision)
    tried += plans(*offloaded, precision=precision, offload=Offload(optimizer="cpu"))

    def body(world):
        return [train_and_weigh(world, plan, job) for plan in tried]

    measured = run_ranks(body, RANKS, timeout_s=240)[0]
    model = described(job, compute, tmp_path)
    for plan, resident in zip(tried, measured, strict=True):
        rest = deepspeed_at_rest(model.for_plan(plan), plan)
        assert sum(rest.values()) == pytest.approx(resident, rel=0.03), (plan.zero, plan.offload, rest)


def test_each_stage_needs_less_than_the_one_before():
    question = asked("llama-7b on 8xH100", 64)
    needs = []
    for plan in plans(0, 1, 2, 3, precision=question.precision, micro_batch=1, accumulation=4):
        layout = dataclasses.replace(plan.layout, **({"shard": 8} if plan.zero else {"replicate": 8}))
        wide = dataclasses.replace(plan, layout=layout)
        needs.append(deepspeed_memory(question.model.for_plan(wide), wide).total)
    assert needs == sorted(needs, reverse=True)
    assert needs[-1] < needs[0] / 3


def test_stage_three_keeps_small_models_gathered():
    assert kept_numel(1e8) == 1e8
    assert kept_numel(7e9) == 5e8


def test_stage_two_pays_for_every_micro_batch_and_stage_one_once():
    question = asked("llama-7b on 8xA100-40GB", 64)
    times = TimeModel(question.cluster, question.calibration)

    def waits(zero, accumulation):
        plan = Plan(
            engine="deepspeed",
            zero=zero,
            layout=Layout(shard=8),
            precision=question.precision,
            accumulation=accumulation,
        )
        parts = deepspeed_time(times, question.model.for_plan(plan), plan).parts
        return parts.get("reduce", 0.0) + parts["contention"]

    assert waits(1, 8) == pytest.approx(waits(1, 1))
    assert waits(2, 8) == pytest.approx(8 * waits(2, 1))


def test_offload_puts_states_on_the_host_and_adds_its_traffic():
    question = asked("llama-7b on 8xH100", 64)
    forms = {form.name: form.best for form in deepspeed_forms(question)}
    kept, offloaded = forms["deepspeed zero2"], forms["deepspeed zero2 offload"]
    assert kept.memory.host == 0
    assert offloaded.memory.host > 6.7e9 / 8 * 16  # master, two moments, gradient
    assert offloaded.time.parts["offload"] > 0
    assert offloaded.time.seconds > kept.time.seconds


def test_the_simplest_stage_that_fits_is_chosen_and_offload_only_if_nothing_else_does():
    roomy = deepspeed_forms(asked("gpt2 on 8xH100", 512))
    tight = deepspeed_forms(asked("llama-13b on 2xA100-40GB", 64))
    assert choose_form(roomy).name == "deepspeed zero0"
    assert choose_form(tight).offloads
    assert all("needs" in form.refusal for form in tight if form.best is None)
    assert [form_reason(form, choose_form(tight)) for form in tight].count("chosen") == 1


def test_the_choice_stands_beside_the_native_one_with_numbers():
    question = asked("llama-7b on 8xH100", 64)
    chosen = choose_form(deepspeed_forms(question))
    sentence = beside_native(chosen, search(question))
    assert "native zero" in sentence
    assert sentence.count("GB") == 2


def test_fp64_and_uneven_batches_are_refused_with_a_message():
    question = asked("llama-7b on 8xH100", 60)
    assert {form.refusal for form in deepspeed_forms(question)} == {"batch size 60 is not divisible by 8 devices"}
    exact = dataclasses.replace(question, batch_size=64, precision=Precision(compute="fp64"))
    assert {form.refusal for form in deepspeed_forms(exact)} == {"DeepSpeed does not compute in fp64"}


def test_the_command_writes_a_plan_for_the_engine(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    line = ["plan", "gpt2-xl", "--cluster", "4xA100-40GB", "--batch-size", "64", "--engine", "deepspeed"]
    assert main([*line, "--out", str(path)]) == 0
    shown = capsys.readouterr().out
    reasons, costs = [line for line in shown.splitlines() if "chosen" in line]
    assert reasons.startswith("deepspeed zero")
    assert costs.startswith("chosen    deepspeed zero")  # the plan that --out writes
    assert "the best plan of engine torch" in shown
    assert 'engine = "deepspeed"' in path.read_text()
