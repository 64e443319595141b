"""DeepSpeed JSON in: usual files are read, errors are named in one sentence, what belongs to the job is reported."""

import json
from pathlib import Path

import pytest

from refusals import refuses
from shardwise.engines.deepspeed.from_json import plan_from_json, read_json
from shardwise.layout import Layout

CONFIGS = sorted((Path(__file__).resolve().parents[4] / "examples" / "03-deepspeed" / "configs").glob("*.json"))

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


def check_refused(text, code, *values, **options):
    with refuses(code, "ds.json", *values) as caught:
        plan_from_json(text if isinstance(text, str) else json.dumps(text), "ds.json", **options)
    assert caught.value.fix
    assert "\n" not in str(caught.value)


def test_the_guides_configs_are_read():
    stages = {path.stem: int(path.stem.removeprefix("zero")[0]) for path in CONFIGS}
    assert stages.keys() >= {"zero1_config", "zero2_config", "zero3_config"}
    for path in CONFIGS:
        found, stage = read_json(path, num_ranks=2), stages[path.stem]
        assert (found.plan.zero, str(found.plan.layout), found.plan.engine) == (stage, "shard2", "deepspeed")
        assert any("optimizer=sw.adamw(lr=" in note for note in found.notes)


def test_what_hugging_face_leaves_open_is_reported_and_given():
    found = reading(TRAINER, num_ranks=4, batch_size=64, precision="bf16")
    plan, notes = found.plan, " | ".join(found.notes)
    assert (plan.zero, plan.layout, plan.batch_size, plan.precision.compute) == (3, Layout(shard=4), 64, "bf16")
    assert plan.offload.optimizer == "cpu"
    assert 'train_batch_size is "auto", which Hugging Face fills in' in notes
    assert 'optimizer AdamW with "auto" for lr, weight_decay' in notes
    assert "steps_per_print" in notes


def test_a_batch_that_nobody_gives_is_asked_for():
    check_refused(TRAINER, "plan.deepspeed-batch-missing", "pass --batch-size", num_ranks=4)
    check_refused({"train_batch_size": 8}, "plan.deepspeed-ranks-unknown", "pass --nproc")


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


def test_a_stage_on_one_rank_shards_nothing():
    found = reading({"train_batch_size": 4, "zero_optimization": {"stage": 2}}, num_ranks=1)
    assert found.plan.zero == 0
    assert any("one rank has nothing" in note for note in found.notes)


def test_gradients_are_reduced_in_the_dtype_of_compute_unless_configured():
    half = {"train_batch_size": 4, "bf16": {"enabled": True}}
    assert reading(half, num_ranks=2).plan.precision.reduce == "bf16"
    assert reading(half | {"communication_data_type": "fp32"}, num_ranks=2).plan.precision.reduce == "fp32"


def test_clipping_that_is_not_configured_is_deepspeeds_default():
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
    assert notes[0] == "optimizer SGD belongs to the job: set optimizer=sw.sgd(lr=0.1, momentum=0.9)"
    assert notes[1] == "scheduler WarmupCosineLR belongs to the job: set schedule=sw.schedules.Cosine(warmup=10)"


def test_features_that_are_off_do_no_harm():
    data = {
        "train_batch_size": 4,
        "torch_autocast": {"enabled": False},
        "tensor_parallel": {"autotp_size": 1},
        "zero_optimization": {"stage": 1, "zero_quantized_weights": False, "zero_hpz_partition_size": 1},
    }
    assert reading(data, num_ranks=2).plan.zero == 1


WRONG = {
    "no JSON": ("stage: 2", ("plan.deepspeed-not-json", "expecting value", "line 1 column 1")),
    "a comment": ('{"a": 1,\n // why\n "b": 2}', ("plan.deepspeed-not-json", "a comment", "line 2 column 2")),
    "a comma at the end": ('{"a": [1, 2,]}', ("plan.deepspeed-not-json", "a trailing comma", "line 1 column 12")),
    "a comma at the end of lines": (
        '{\n"a": 1,\n}',
        ("plan.deepspeed-not-json", "a trailing comma", "line 2 column 7"),
    ),
    "a list": ("[]", ("plan.deepspeed-not-object", "list")),
    "a key twice": ('{"bf16": {}, "bf16": {}}', ("plan.deepspeed-key-repeated", "'bf16'")),
    "infinity": ('{"gradient_clipping": Infinity}', ("plan.deepspeed-not-finite", "Infinity")),
    "unknown": (
        {"zero_optimisation": {}},
        ("plan.deepspeed-unknown-key", "'zero_optimisation'", "'zero_optimization'"),
    ),
    "unknown inside": (
        {"zero_optimization": {"overlap_com": True}},
        ("plan.deepspeed-unknown-key", "'zero_optimization.overlap_com'", "'overlap_comm'"),
    ),
    "stage 4": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 4}},
        ("plan.deepspeed-stage-invalid", "zero_optimization.stage", 4),
    ),
    "half a stage": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 0.5}},
        ("plan.deepspeed-not-whole-number", "stage", 0.5),
    ),
    "a section that is none": ({"bf16": "yes"}, ("plan.deepspeed-not-section", "bf16", "'yes'")),
    "a switch that is none": (
        {"train_batch_size": 4, "bf16": {"enabled": 1.5}},
        ("plan.deepspeed-not-boolean", "enabled", 1.5),
    ),
    "both halves": (
        {"train_batch_size": 4, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
        ("plan.deepspeed-two-precisions", "bf16 and fp16"),
    ),
    "contradictory batch": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
        ("plan.batch-split-mismatch", 3, 2, 32, "accumulation=4"),
    ),
    "batch that does not divide": ({"train_batch_size": 7}, ("plan.batch-not-divisible", 7, 2)),
    "no batch": ({"bf16": {}}, ("plan.deepspeed-batch-missing", "train_batch_size", "train_micro_batch_size_per_gpu")),
    "offloaded parameters at stage 2": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        ("plan.deepspeed-offload-stage", "offload_param", 2),
    ),
    "nvme without a folder": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        ("plan.nvme-folder-missing", "nvme_path"),
    ),
    "old and new offload": (
        {
            "train_batch_size": 4,
            "zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
        },
        ("plan.deepspeed-key-two-names", "offload_optimizer", "cpu_offload"),
    ),
    "a place that is none": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}},
        ("plan.deepspeed-offload-device", "offload_param.device 'gpu'"),
    ),
    "what a plan cannot hold": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        ("plan.deepspeed-no-equivalent", "zero_optimization.zero_quantized_weights"),
    ),
    "a removed feature": ({"sparse_gradients": True}, ("plan.deepspeed-no-equivalent", "sparse_gradients")),
    "an unknown dtype": (
        {"train_batch_size": 4, "communication_data_type": "fp8"},
        ("plan.deepspeed-unknown-dtype", "communication_data_type 'fp8'"),
    ),
    "no bucket": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 2, "reduce_bucket_size": 0}},
        ("plan.bucket-not-positive", "reduce_bucket_size"),
    ),
}


@pytest.mark.parametrize(("text", "refusal"), WRONG.values(), ids=WRONG)
def test_wrong_json_is_one_sentence(text, refusal):
    check_refused(text, *refusal, num_ranks=2)


def test_a_missing_file_or_one_without_text_is_one_sentence(tmp_path):
    with refuses("plan.deepspeed-read-failed", "none.json"):
        read_json(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with refuses("plan.deepspeed-read-failed", "bytes.json"):
        read_json(tmp_path / "bytes.json")
