import dataclasses

import pytest

from refusals import refuses
from shardwise.engines.engine import require_supported
from shardwise.hardware.calibration import default_calibration
from shardwise.hardware.cluster import parse_cluster
from shardwise.layout import Layout
from shardwise.planner.cost.memory import predict_memory
from shardwise.planner.model.decoder_parts import published
from shardwise.planner.model.forms import Model
from shardwise.planner.search.advice import capture_gain, compile_gain, rounds_gain, smallest_cluster
from shardwise.planner.search.choices import LEAST_TOKENS
from shardwise.planner.search.explain import (
    decision_path,
    over_the_host_limit,
    over_the_limit,
    reason,
    savings,
)
from shardwise.planner.search.question import Question
from shardwise.planner.search.report_data import answer_data
from shardwise.planner.search.search import search
from shardwise.planner.search.subject import published_subject, usual_batch
from shardwise.plans.plan import Plan
from shardwise.plans.sections import Precision


def model(name, **options):
    plain, gathered = (published(name, compute="bf16", gathered=gathered, **options) for gathered in (False, True))
    return Model(plain=plain, gathered=gathered)


def asked(name, cluster, batch_size):
    where = parse_cluster(cluster)
    return Question(
        model=model(name) if isinstance(name, str) else name,
        cluster=where,
        calibration=default_calibration(where.node),
        batch_size=batch_size,
        precision=Precision(compute="bf16"),
    )


def wide_convolutions(times):
    """A ResNet-50 with so many times as many parameters in every weight, work and memory otherwise as it is."""

    def widen(shape):
        parts = tuple(
            dataclasses.replace(
                part,
                weights=tuple(dataclasses.replace(w, numel=w.numel * times, rows=w.rows * times) for w in part.weights),
            )
            for part in shape.parts
        )
        return dataclasses.replace(shape, parts=parts)

    resnet = model("resnet-50")
    return Model(plain=widen(resnet.plain), gathered=widen(resnet.gathered))


def test_a_family_without_room_says_what_it_needs_and_what_to_shard():
    words = reason(search(asked("llama-7b", "8xA100-40GB", 64)), "ddp")
    limit = "a plan may use 40.2 GB (95% of the device's 42.3 GB)"
    assert f"{limit}: shard optimizer states (-47.2 GB) or shard gradients (-47.2 GB)" in words


def test_a_plan_between_the_limit_and_the_device_says_which_it_exceeds():
    question = asked("llama-7b", "8xA100-40GB", 64)
    memory = search(question).families["ddp"].memory
    near = dataclasses.replace(memory, reserved=41.2e9 - memory.outside)
    assert over_the_limit(near, question) == "needs 41.2 GB, but a plan may use 40.2 GB (95% of the device's 42.3 GB)"
    near = dataclasses.replace(memory, host=question.host_capacity + 1e9)
    assert "(90% of a device's share of the node's " in over_the_host_limit(near, question)


def test_reasons_name_the_chosen_the_slower_and_the_unneeded():
    answer = search(asked("llama-7b", "8xA100-40GB", 64))
    assert reason(answer, answer.best.family) == "chosen"
    assert "slower: " in reason(answer, "hsdp")
    assert reason(answer, "offload").startswith("not needed: zero3 fits without it")


@pytest.mark.parametrize(
    ("name", "cluster", "family", "words"),
    [
        ("resnet-50", "1xH100", "zero3", "at least two devices"),
        ("resnet-50", "2xH100", "hsdp", "too few for two kinds"),
        ("resnet-50", "4xH100", "tp", "no tensor-parallel rules"),
        ("gpt2-xl", "4xH100", "tp", "only by 5, 25"),
    ],
)
def test_what_cannot_be_has_its_own_reason(name, cluster, family, words):
    assert words in reason(search(asked(name, cluster, 32)), family)


@pytest.mark.parametrize(
    ("name", "cluster", "words"),
    [
        ("resnet-50", "8xH100", "not known to support context parallelism"),
        ("llama-7b", "8xH100", f"too short to split in two: a rank needs at least {LEAST_TOKENS}"),
        ("llama3-8b", "3xH100", "only by 2, 4, 8, 16, 32"),
    ],
)
def test_sequences_that_are_not_split_have_their_reason(name, cluster, words):
    described = model(name, length=2 * LEAST_TOKENS) if name == "llama3-8b" else name
    assert words in reason(search(asked(described, cluster, 48)), "cp")


def test_cutting_sequences_is_named_where_they_do_not_fit():
    question = asked(model("llama3-8b", length=131_072), "8xH100", 32)
    assert "split sequences by cp 8" in reason(search(question), "zero3")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(shard=8), ["split sequences by cp 8"]),
        (Layout(shard=2, tp=4), ["split sequences by cp 2"]),
        (Layout(pp=2, shard=4), []),
    ],
)
def test_sequences_are_to_be_cut_only_as_far_as_the_rest_of_the_plan_allows(layout, words):
    question = asked(model("llama3-8b", length=131_072), "8xH100", 32)
    plan = Plan(layout=layout, zero=3, precision=question.precision)
    memory = predict_memory(question.model.for_plan(plan), plan)
    ways = [way.partition(" (-")[0] for way in savings(plan, memory, question)]
    assert [way for way in ways if way.startswith("split sequences")] == words


@pytest.mark.parametrize(
    ("cluster", "words"), [("8xH100", "unsplit under zero3"), ("64xH100", "32 samples use all 64 devices only if")]
)
def test_why_sequences_are_split_is_reported(cluster, words):
    fork = decision_path(search(asked(model("llama3-8b", length=131_072), cluster, 32)))[-2]
    assert fork.answer.startswith("over ")
    assert words in fork.because


def test_gains_of_capture_and_of_rare_syncs_are_predicted():
    small = search(asked("gpt2-tiny", "1xH200", 8))
    assert capture_gain(small) > 0.3
    assert rounds_gain(small) == 0
    slow = search(asked("gpt2", "8x1xA100-40GB", 256))
    assert slow.best.family == "ddp"
    assert 0 < rounds_gain(slow) < 1
    assert capture_gain(slow) == 0


def test_rare_meetings_are_not_advised_where_batch_norms_meet_in_every_step():
    slow = search(asked("resnet-50", "8x1xA100-40GB", 256))
    assert slow.best.plan.layout.replicate == 8
    assert rounds_gain(slow) == 0


def test_a_batch_smaller_than_the_world_is_the_reason():
    assert "4 has fewer samples than the 8 devices" in reason(search(asked("llama-7b", "8xH100", 4)), "zero3")


def test_savings_come_with_the_largest_first():
    answer = search(asked("llama-7b", "8xA100-40GB", 64))
    rejected = answer.families["zero1"]
    ways = savings(rejected.plan, rejected.memory, answer.question)
    assert ways[0].startswith("shard ")
    assert all("optimizer states" not in way or way.startswith("offload") for way in ways)


def test_a_model_that_fits_ends_at_ddp():
    path = decision_path(search(asked("resnet-50", "8xA100-80GB", 256)))
    assert [(fork.question, fork.answer) for fork in path] == [
        ("Does the model fit in GPU memory?", "yes"),
        ("The decision tree recommends", "ddp"),
        ("The predictions recommend", "ddp"),
    ]
    assert decision_path(search(asked("resnet-50", "2xcpu", 16)))[0].question == "Does the model fit in host memory?"


def test_a_large_transformer_ends_at_fsdp():
    path = decision_path(search(asked("llama-7b", "8xA100-40GB", 64)))
    assert [fork.answer for fork in path] == ["no", "yes", "fsdp or zero3", "zero3"]
    assert path[0].because.endswith("of 42.3 GB")


def test_a_large_convolutional_net_on_slow_links_ends_at_a_pipeline():
    path = decision_path(search(asked(wide_convolutions(100), "8xRTX-4090", 256)))
    assert [fork.answer for fork in path] == ["no", "no", "pipeline or tensor parallel", "pp"]


def test_what_compiling_gains_is_said():
    assert 0.05 < compile_gain(search(asked("llama-7b", "8xA100-40GB", 64))) < 0.3
    assert compile_gain(search(asked("llama3-405b", "1xH100", 8))) == 0


def test_the_smallest_cluster_holds_what_this_one_does_not():
    question = asked("llama-70b", "1xH100", 64)
    cluster, family = smallest_cluster(question)
    assert search(question).best is None
    assert search(dataclasses.replace(question, cluster=cluster)).best.family == family


def test_no_cluster_holds_a_sample_that_fills_a_device():
    huge = dataclasses.replace(asked("llama3-405b", "1xT4", 8), batch_size=8)
    assert smallest_cluster(huge, batch_size=7) is None


def test_data_has_the_numbers_of_the_answer():
    answer = search(asked("llama-7b", "8xA100-40GB", 64))
    data = answer_data(answer, every=True)
    assert data["best"]["plan"]["layout"] == str(answer.best.plan.layout)
    assert data["best"]["time"]["step_s"] == answer.best.time.seconds
    assert data["families"]["ddp"]["fits"] is False
    assert data["families"]["ddp"]["memory"]["total_bytes"] > answer.question.cluster.device.memory_bytes
    assert len(data["candidates"]) == data["plans_predicted"]


def test_adapters_freeze_all_weights_and_need_less_memory():
    whole = asked("llama-70b", "8xH100", 128)
    tuned = dataclasses.replace(whole, model=model("llama-70b", lora=16))
    assert search(whole).best.family == "offload"
    assert search(tuned).best.family == "zero3"
    assert {
        weight.trained for part in tuned.model.plain.parts for weight in part.weights if "lora" not in weight.name
    } == {False}


def test_adapters_of_rank_0_are_refused():
    with refuses("job.lora-rank-invalid", 0):
        published_subject("llama-7b", parse_cluster("8xH100"), accepts=require_supported, lora=0)


@pytest.mark.parametrize(
    ("name", "tokens", "devices", "lora", "batch"),
    [
        ("resnet-50", None, 8, False, 256),
        ("gpt2-xl", 1024, 4, False, 512),
        ("llama-70b", 4096, 48, False, 1056),
        ("llama3-405b", 8192, 16_384, False, 2048),
        ("llama-7b", 4096, 8, True, 128),
    ],
)
def test_usual_batches_divide_over_the_devices(name, tokens, devices, lora, batch):
    assert usual_batch(name, tokens, devices, lora=lora) == batch
