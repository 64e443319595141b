"""DeepSpeed JSON in: what people write is read, what is wrong is named in one sentence, what is the job's is said."""

import json
from pathlib import Path

import pytest

from shardwise.engines.deepspeed.from_json import plan_from_json, read_json
from shardwise.errors import PlanError
from shardwise.layout import Layout

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "examples" / "03-deepspeed" / "configs").glob("*.json"))

TRAINER = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""As Hugging Face's documentation writes it."""


def reading(data, **options):
    return plan_from_json(json.dumps(data), "ds.json", **options)


def refusal(text, **options):
    with pytest.raises(PlanError) as caught:
        plan_from_json(text if isinstance(text, str) else json.dumps(text), "ds.json", **options)
    assert caught.value.fix
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_guides_configs_are_read():
    assert [path.stem for path in CONFIGS] == ["zero1_config", "zero2_config", "zero3_config"]
    for stage, path in enumerate(CONFIGS, 1):
        found = read_json(path, num_ranks=2)
        assert (found.plan.zero, str(found.plan.layout), found.plan.engine) == (stage, "shard2", "deepspeed")
        assert any("optimizer=sw.adamw(lr=" in note for note in found.notes)


def test_what_hugging_face_leaves_open_is_said_and_given():
    found = reading(TRAINER, num_ranks=4, batch_size=64, precision="bf16")
    plan, notes = found.plan, " | ".join(found.notes)
    assert (plan.zero, plan.layout, plan.batch_size, plan.precision.compute) == (3, Layout(shard=4), 64, "bf16")
    assert plan.offload.optimizer == "cpu"
    assert 'train_batch_size is "auto", which Hugging Face fills in' in notes
    assert "lr, weight_decay is left to Hugging Face" in notes
    assert "steps_per_print" in notes


def test_a_batch_that_nobody_gives_is_asked_for():
    assert refusal(TRAINER, num_ranks=4).endswith("give --batch-size")
    assert refusal({"train_batch_size": 8}).endswith("give --nproc")


def test_the_number_of_ranks_follows_from_the_three_batch_numbers():
    data = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    plan = reading(data | {"zero_optimization": {"stage": 2}}).plan
    assert (plan.layout, plan.micro_batch, plan.accumulation) == (Layout(shard=4), 4, 3)


BATCHES = {
    "batch alone": ({"train_batch_size": 24}, (6, 1)),
    "batch and micro-batch": ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, (2, 3)),
    "batch and accumulation": ({"train_batch_size": 24, "gradient_accumulation_steps": 2}, (3, 2)),
    "micro-batch alone": ({"train_micro_batch_size_per_gpu": 5}, (5, 1)),
    "micro-batch and accumulation": (
        {"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2},
        (5, 2),
    ),
}


@pytest.mark.parametrize(("data", "split"), BATCHES.values(), ids=BATCHES)
def test_the_batch_is_derived_as_deepspeed_does(data, split):
    plan = reading(data, num_ranks=4).plan
    assert (plan.micro_batch, plan.accumulation) == split


def test_a_stage_on_one_rank_cuts_nothing():
    found = reading({"train_batch_size": 4, "zero_optimization": {"stage": 2}}, num_ranks=1)
    assert found.plan.zero == 0
    assert any("on one rank" in note for note in found.notes)


def test_gradients_travel_in_the_dtype_of_compute_unless_said():
    half = {"train_batch_size": 4, "bf16": {"enabled": True}}
    assert reading(half, num_ranks=2).plan.precision.reduce == "bf16"
    assert reading(half | {"communication_data_type": "fp32"}, num_ranks=2).plan.precision.reduce == "fp32"


def test_clipping_that_is_not_said_is_deepspeeds_own():
    unsaid = " ".join(reading({"train_batch_size": 4}, num_ranks=2).notes)
    assert "clip_norm=1.0" in unsaid
    assert "clip" not in " ".join(reading({"train_batch_size": 4, "gradient_clipping": 0}, num_ranks=2).notes)


def test_optimizer_and_schedule_become_lines_of_the_job():
    data = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10}},
    }
    notes = reading(data, num_ranks=2).notes
    assert notes[0] == "optimizer SGD: the job's: optimizer=sw.sgd(lr=0.1, momentum=0.9)"
    assert notes[1] == "scheduler WarmupCosineLR: the job's: schedule=sw.schedules.Cosine(warmup=10)"


def test_features_that_are_off_do_no_harm():
    data = {
        "train_batch_size": 4,
        "torch_autocast": {"enabled": False},
        "tensor_parallel": {"autotp_size": 1},
        "zero_optimization": {"stage": 1, "zero_quantized_weights": False, "zero_hpz_partition_size": 1},
    }
    assert reading(data, num_ranks=2).plan.zero == 1


WRONG = {
    "no JSON": ("stage: 2", "ds.json is no JSON: expecting value at line 1 column 1: mend it there"),
    "a comment": ('{"a": 1,\n // why\n "b": 2}', "ds.json is no JSON: a comment at line 2 column 2: mend it there"),
    "a comma at the end": ('{"a": [1, 2,]}', "ds.json is no JSON: a comma before the end at line 1 column 12"),
    "a comma at the end of lines": ('{\n"a": 1,\n}', "ds.json is no JSON: a comma before the end at line 2 column 7"),
    "a list": ("[]", "ds.json holds a list: write an object"),
    "a key twice": ('{"bf16": {}, "bf16": {}}', "ds.json has the key 'bf16' twice"),
    "infinity": ('{"gradient_clipping": Infinity}', "ds.json holds Infinity"),
    "unknown": ({"zero_optimisation": {}}, "ds.json has an unknown key 'zero_optimisation': did you mean 'zero_optim"),
    "unknown inside": (
        {"zero_optimization": {"overlap_com": True}},
        "ds.json has an unknown key 'zero_optimization.overlap_com': did you mean 'overlap_comm'?",
    ),
    "stage 4": ({"train_batch_size": 4, "zero_optimization": {"stage": 4}}, "ds.json has zero_optimization.stage 4"),
    "half a stage": ({"train_batch_size": 4, "zero_optimization": {"stage": 0.5}}, "ds.json has stage 0.5"),
    "a section that is none": ({"bf16": "yes"}, "ds.json has bf16 'yes'"),
    "a switch that is none": ({"train_batch_size": 4, "bf16": {"enabled": 1.5}}, "ds.json has enabled 1.5"),
    "both halves": (
        {"train_batch_size": 4, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
        "ds.json enables bf16 and fp16",
    ),
    "contradictory batch": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
        "ds.json: micro_batch 4 x accumulation 3 x 2 readers is not batch_size 32: set accumulation=4",
    ),
    "batch that does not divide": ({"train_batch_size": 7}, "ds.json: batch_size 7 does not divide by 2 readers"),
    "no batch": ({"bf16": {}}, "ds.json has neither train_batch_size nor train_micro_batch_size_per_gpu"),
    "offloaded parameters at stage 2": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "ds.json has offload_param with stage 2",
    ),
    "nvme without a folder": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "ds.json offloads to nvme without a folder",
    ),
    "old and new offload": (
        {
            "train_batch_size": 4,
            "zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
        },
        "ds.json has offload_optimizer and cpu_offload",
    ),
    "a place that is none": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}},
        "ds.json has offload_param.device 'gpu'",
    ),
    "what a plan cannot hold": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        "ds.json has zero_optimization.zero_quantized_weights, for which a plan has no word",
    ),
    "a removed feature": ({"sparse_gradients": True}, "ds.json has sparse_gradients, for which a plan has no word"),
    "an unknown dtype": (
        {"train_batch_size": 4, "communication_data_type": "fp8"},
        "ds.json has communication_data_type 'fp8'",
    ),
    "no bucket": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 2, "reduce_bucket_size": 0}},
        "ds.json has reduce_bucket_size 0",
    ),
}


@pytest.mark.parametrize(("text", "words"), WRONG.values(), ids=WRONG)
def test_wrong_json_is_one_sentence(text, words):
    assert refusal(text, num_ranks=2).startswith(words)


def test_a_file_that_is_not_there_or_no_text_is_one_sentence(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        read_json(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="it is no text"):
        read_json(tmp_path / "bytes.json")
