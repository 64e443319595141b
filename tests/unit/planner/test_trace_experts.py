"""Jobs with mixtures of experts of transformers are traced: counts are exact, and memory is that of a real step."""

import dataclasses

import pytest
import torch

import shardwise as sw
from jobs import Tokens
from shardwise.launcher.local.function import run_forked
from shardwise.measurement.memory import LiveBytes
from shardwise.planner.cost.memory import predict_memory
from shardwise.planner.trace.trace import describe
from shardwise.plans import Plan
from shardwise.testing import fake_world

WIDTH, HIDDEN, EXPERTS, CHOSEN, TOKENS, LAYERS = 64, 96, 4, 2, 64, 2
SMALL = {
    "vocab_size": 256,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": TOKENS,
}
KINDS = {
    "MixtralConfig": {"intermediate_size": HIDDEN, "num_local_experts": EXPERTS},
    "Qwen3MoeConfig": {"moe_intermediate_size": HIDDEN, "num_experts": EXPERTS, "head_dim": 16},
}
LATENT = {"n_routed_experts": EXPERTS, "moe_intermediate_size": HIDDEN, "n_group": 1, "topk_group": 1}
OTHER = {"DeepseekV3Config": {"first_k_dense_replace": 1, "intermediate_size": HIDDEN, **LATENT}}


def experts_job(kind):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(**SMALL, **(KINDS | OTHER)[kind])
    return sw.Job(
        model=lambda: transformers.AutoModelForCausalLM.from_config(config),
        data=lambda split: Tokens(64, TOKENS, 256),
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=4,
        steps=3,
    )


@pytest.fixture(scope="module", params=KINDS)
def job(request):
    return experts_job(request.param)


@pytest.fixture(scope="module")
def described(job):
    return {compute: describe(job, compute) for compute in ("fp32", "bf16")}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_each_token_passes_the_chosen_experts_only(job, described, compute):
    shape = described[compute].gathered
    assert shape.numel == sum(parameter.numel() for parameter in job.model().parameters())
    (block,) = (part for part in shape.parts if part.kind == "block")
    assert block.count == LAYERS
    products = {(item.inner, item.columns): item.rows * item.count for item in block.work.matmuls}
    assert products[WIDTH, 2 * HIDDEN] == products[HIDDEN, WIDTH] == TOKENS * CHOSEN


@pytest.mark.parametrize(("name", "ranks"), [("one", 1), ("zero3", 4)])
def test_predicted_memory_with_experts_is_what_a_step_holds(job, described, name, ranks):
    plan = Plan.preset(name, ranks, batch_size=4 * ranks)
    sized = dataclasses.replace(job, batch_size=4 * ranks)
    predicted = predict_memory(described["fp32"].for_plan(plan), plan, context=0.0).peak

    def body(_):
        torch.set_num_threads(1)
        with fake_world(ranks, device="cpu") as world:
            step = sw.build_step(sized, plan, world)
            with LiveBytes("cpu") as live:
                live.watch("parameters", [parameter for _, parameter in step.named_parameters()])
                for batch in step.feed:
                    if step(batch).number == 0:
                        live.reset_peak()
        return live.peak_bytes

    assert predicted == pytest.approx(run_forked(body, 1, timeout_s=100)[0], rel=0.06)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_attention_whose_values_are_narrower_than_its_queries_is_traced(compute):
    shape = describe(experts_job("DeepseekV3Config"), compute).plain
    assert [part.count for part in shape.parts if part.kind == "block"] == [1, 1]  # one dense block, one of experts
    assert shape.heads == 4


def test_a_report_for_a_job_with_experts_has_plans_that_fit(job):
    report = sw.plan(job, cluster="4xH100", plan="zero3")
    assert (report.exit_code, report.asked.fits) == (0, True)
