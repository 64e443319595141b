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
from shardwise.planner.search.capacity import capacity_text, over_the_host_limit, over_the_limit, savings
from shardwise.planner.search.choices import LEAST_TOKENS
from shardwise.planner.search.explain import decision_path, reason
from shardwise.planner.search.question import Question
from shardwise.planner.search.report_data import answer_data
from shardwise.planner.search.search import search
from shardwise.planner.search.subject import published_subject, usual_batch
from shardwise.plans.plan import Plan
from shardwise.plans.sections import Precision
from shardwise.units import format_seconds


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


def test_a_family_that_does_not_fit_names_what_it_needs_and_what_to_shard():
    text = reason(search(asked("llama-7b", "8xA100-40GB", 64)), "ddp")
    limit = "a plan may use 40.2 GB (95% of the device's 42.3 GB)"
    assert f"{limit}: ZeRO-3 (-117 GB) and " in text
    assert text.endswith("together would be enough")


def test_a_plan_between_the_limit_and_the_device_names_which_it_exceeds():
    question = asked("llama-7b", "8xA100-40GB", 64)
    memory = search(question).families["ddp"].memory
    near = dataclasses.replace(memory, reserved=41.2e9 - memory.outside)
    assert over_the_limit(near, question) == "needs 41.2 GB, but a plan may use 40.2 GB (95% of the device's 42.3 GB)"
    near = dataclasses.replace(memory, host=question.host_capacity + 1e9)
    assert "(90% of a device's share of the node's " in over_the_host_limit(near, question)


def test_reasons_name_the_chosen_the_slower_and_the_unneeded():
    answer = search(asked("llama-7b", "8xA100-40GB", 64))
    assert reason(answer, answer.best.family) == "chosen"
    slower = answer.families["hsdp"]
    difference = slower.time.parts["recompute"] - answer.best.time.parts["recompute"]
    assert f"slower: recompute takes {format_seconds(difference)} longer" in reason(answer, "hsdp")
    assert reason(answer, "offload").startswith("not needed: zero3 fits without it")


def test_the_model_error_within_which_the_simpler_plan_wins_is_printed():
    answer = search(asked("llama3-8b", "8xH100", 512))
    assert reason(answer, "pp") == "6% faster, which is within the model error of 10%, but less simple"
    assert "within the model error of 10%" in decision_path(answer)[-1].because


@pytest.mark.parametrize(
    ("name", "cluster", "family", "expected"),
    [
        ("resnet-50", "1xH100", "zero3", "at least two devices"),
        ("resnet-50", "2xH100", "hsdp", "too few for two kinds"),
        ("resnet-50", "4xH100", "tp", "no tensor-parallel rules"),
        ("gpt2-xl", "4xH100", "tp", "only by 5, 25"),
    ],
)
def test_what_cannot_be_has_its_own_reason(name, cluster, family, expected):
    assert expected in reason(search(asked(name, cluster, 32)), family)


@pytest.mark.parametrize(
    ("name", "cluster", "expected"),
    [
        ("resnet-50", "8xH100", "not known to support context parallelism"),
        ("llama-7b", "8xH100", f"too short to split in two: a rank needs at least {LEAST_TOKENS:,}"),
        ("llama3-8b", "3xH100", "only by 2, 4, 8, 16, 32"),
    ],
)
def test_sequences_that_are_not_split_have_their_reason(name, cluster, expected):
    described = model(name, length=2 * LEAST_TOKENS) if name == "llama3-8b" else name
    assert expected in reason(search(asked(described, cluster, 48)), "cp")


def test_splitting_sequences_is_named_where_they_do_not_fit():
    question = asked(model("llama3-8b", length=131_072), "8xH100", 32)
    assert "sequences split by cp 8" in reason(search(question), "zero3")


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(shard=8), ["sequences split by cp 8"]),
        (Layout(shard=2, tp=4), ["sequences split by cp 2"]),
        (Layout(pp=2, shard=4), []),
    ],
)
def test_sequences_are_to_be_split_only_as_far_as_the_rest_of_the_plan_allows(layout, expected):
    question = asked(model("llama3-8b", length=131_072), "8xH100", 32)
    plan = Plan(layout=layout, zero=3, precision=question.precision)
    memory = predict_memory(question.model.for_plan(plan), plan)
    ways = [way.text for way in savings(plan, memory, question)]
    assert [way for way in ways if way.startswith("sequences split")] == expected


@pytest.mark.parametrize(
    ("cluster", "expected"), [("8xH100", "unsplit under zero3"), ("64xH100", "32 samples use all 64 devices only if")]
)
def test_why_sequences_are_split_is_reported(cluster, expected):
    fork = decision_path(search(asked(model("llama3-8b", length=131_072), cluster, 32)))[-2]
    assert fork.answer.startswith("over ")
    assert expected in fork.because


def test_gains_of_capture_and_of_rare_syncs_are_predicted():
    small = search(asked("gpt2-tiny", "1xH200", 8))
    assert capture_gain(small) > 0.3
    assert rounds_gain(small) == 0
    slow = search(asked("gpt2", "8x1xA100-40GB", 256))
    assert slow.best.family == "ddp"
    assert 0 < rounds_gain(slow) < 1
    assert capture_gain(slow) == 0


def test_rare_synchronization_is_not_advised_where_batch_norms_synchronize_in_every_step():
    slow = search(asked("resnet-50", "8x1xA100-40GB", 256))
    assert slow.best.plan.layout.replicate == 8
    assert rounds_gain(slow) == 0


def test_a_batch_smaller_than_the_world_is_the_reason():
    assert "4 has fewer samples than the 8 devices" in reason(search(asked("llama-7b", "8xH100", 4)), "zero3")


def test_savings_are_those_of_the_changed_plan():
    answer = search(asked("llama-7b", "8xA100-40GB", 64))
    rejected = answer.families["zero1"]
    ways = savings(rejected.plan, rejected.memory, answer.question)
    assert [way.text for way in ways[:2]] == ["ZeRO-2", "ZeRO-3"]
    for way in ways:
        assert way.memory == answer.question.memory_of(way.plan)
        assert way.saved == rejected.memory.total - way.memory.total


@pytest.mark.parametrize(
    ("name", "cluster", "family", "expected"),
    [
        ("llama-70b", "8xH100", "zero3", "optimizer states on the host (-73.1 GB) and parameters on the host"),
        ("llama-70b", "8xH100", "tp", "optimizer states on the host (-73.1 GB) would be enough"),
        ("llama-13b", "2xH100", "tp", "use more devices"),
    ],
)
def test_savings_that_do_not_suffice_are_not_proposed_alone(name, cluster, family, expected):
    assert expected in reason(search(asked(name, cluster, 512)), family)


def test_the_limit_names_its_cause():
    question = asked("llama-7b", "8xA100-40GB", 64)
    assert "of which 95% may be used" in capacity_text(question)
    corrected = dataclasses.replace(question, memory_ratio=1.2)
    assert "because own runs needed 1.20 times the predicted memory" in capacity_text(corrected)
    assert "--max-memory" not in capacity_text(corrected)
    limited = dataclasses.replace(corrected, max_bytes=20e9)
    assert capacity_text(limited) == "--max-memory allows 20 GB of the 42.3 GB of A100-40GB"
    memory = search(question).families["ddp"].memory
    assert "own runs" in over_the_limit(memory, corrected)
    assert "(--max-memory)" in over_the_limit(memory, limited)


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
    assert path[0].because.endswith("and a plan may use 40.2 GB of 42.3 GB")


def test_a_large_convolutional_net_on_slow_links_ends_at_a_pipeline():
    path = decision_path(search(asked(wide_convolutions(100), "8xRTX-4090", 256)))
    assert [fork.answer for fork in path] == ["no", "no", "pipeline or tensor parallel", "pp"]


def test_the_gain_of_compiling_is_reported():
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


@pytest.mark.parametrize(("batch", "length"), [(2048, 8192), (128, 131_072)])
def test_a_batch_below_the_devices_is_not_advised_to_grow_where_the_model_must_be_split(batch, length):
    path = decision_path(search(asked(model("llama3-405b", length=length), "16384xH100", batch)))
    (advice,) = (fork for fork in path if fork.question == "The decision tree recommends")
    assert advice.answer == "fsdp or zero3 combined with tp, pp or cp"
    assert advice.because == f"{batch:,} samples occupy all 16,384 devices only if several devices share a sample"


def test_the_precision_of_adapters_is_beside_that_of_the_frozen_weights():
    where = parse_cluster("8xH100")
    whole, tuned = (published_subject("llama-70b", where, accepts=require_supported, lora=lora) for lora in (None, 16))
    assert whole.precision_text == str(whole.precision)
    assert tuned.precision_text == f"frozen weights bf16 · trained {tuned.precision}"
