"""Adapters as they are configured: values, targets, and peft's config."""

import json

import pytest

import shardwise as sw
from refusals import refuses
from shardwise.job.load import override_job
from shardwise.job.lora import CONFIG, Lora, config_json, read_config

NAMES = ["layers.0.attn.q_proj", "layers.0.attn.k_proj", "layers.1.attn.q_proj", "lm_head"]
FACTS = {"rank": 4, "alpha": 8, "dropout": 0.0, "transposed": []}


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"rank": 0}, ("job.lora-rank-invalid", 0)),
        ({"rank": 2.0}, ("job.lora-rank-invalid", "2.0")),
        ({"alpha": 0}, ("job.lora-alpha-invalid", 0)),
        ({"dropout": 1.0}, ("job.lora-dropout-invalid", "1.0")),
        ({"targets": ()}, ("job.lora-targets-invalid",)),
        ({"targets": ("q", 3)}, ("job.lora-targets-invalid",)),
    ],
)
def test_adapters_that_cannot_be_are_refused(fields, refusal):
    with refuses(*refusal):
        Lora(**{"targets": ("q_proj",), **fields})


@pytest.mark.parametrize(
    ("target", "chosen"),
    [
        ("q_proj", [0, 2]),
        ("attn.q_proj", [0, 2]),
        ("layers.*.attn.k_proj", [1]),
        ("0.attn.*", [0, 1]),
        ("lm_head", [3]),
    ],
)
def test_a_target_is_the_end_of_a_name(target, chosen):
    assert Lora(targets=(target,)).choose(NAMES) == [NAMES[index] for index in chosen]


def test_a_part_of_a_part_is_not_a_target():
    with refuses("job.lora-target-unmatched", "'proj'"):
        Lora(targets=("proj",)).choose(NAMES)


@pytest.mark.parametrize(("target", "near"), [("q_prj", "'q_proj'"), ("layers.*.attn.qproj", "'layers.*.attn.q_proj'")])
def test_a_target_that_matches_nothing_gets_the_nearest_name(target, near):
    with refuses("job.lora-target-unmatched", near):
        Lora(targets=("lm_head", target)).choose(NAMES)


def test_fields_are_set_from_the_command_line():
    job = sw.Job(
        model=lambda: None,
        data=lambda split: None,
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=1.0),
        batch_size=1,
        steps=1,
        lora=Lora(targets="q_proj"),
    )
    changed = override_job(job, {"lora.rank": "8", "lora.targets": '["q_proj", "v_proj"]'})
    assert (changed.lora.rank, changed.lora.targets, changed.lora.scale) == (8, ("q_proj", "v_proj"), 4)
    assert override_job(job, {"lora": "none"}).lora is None


def test_targets_are_named_by_their_ends_where_no_other_module_ends_so():
    weights = [f"{name}.weight" for name in NAMES]
    short = json.loads(config_json(FACTS, [NAMES[0], NAMES[2]], weights))
    assert short["target_modules"] == ["q_proj"]
    whole = json.loads(config_json(FACTS, [NAMES[0]], weights))
    assert whole["target_modules"] == [NAMES[0]]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"use_dora": True}, ("job.adapter-option-unsupported", "use_dora")),
        ({"alora_invocation_tokens": [1, 2]}, ("job.adapter-option-unsupported", "alora_invocation_tokens")),
        ({"use_qalora": True}, ("job.adapter-option-unsupported", "use_qalora")),
        ({"use_bdlora": {"nblocks": 2}}, ("job.adapter-option-unsupported", "use_bdlora")),
        ({"arrow_config": {"top_k": 3}}, ("job.adapter-option-unsupported", "arrow_config")),
        ({"kasa_config": {"beta": 1e-4}}, ("job.adapter-option-unsupported", "kasa_config")),
        (
            {"init_lora_weights": "pissa_niter_4"},
            ("job.adapter-init-changes-base", "init_lora_weights", "'pissa_niter_4'"),
        ),
        ({"init_lora_weights": "olora"}, ("job.adapter-init-changes-base", "'olora'")),
        ({"bias": "all"}, ("job.adapter-trains-biases",)),
        ({"r": None}, ("job.adapter-config-invalid",)),
    ],
)
def test_adapters_of_another_kind_are_refused(tmp_path, change, refusal):
    config = json.loads(config_json(FACTS, ["a"], ["a.weight"]))
    (tmp_path / CONFIG).write_text(json.dumps(config))
    assert read_config(tmp_path)["alpha"] == 8
    (tmp_path / CONFIG).write_text(json.dumps(config | change))
    with refuses(*refusal):
        read_config(tmp_path)


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva"])
def test_adapters_that_started_beside_unchanged_weights_are_read(tmp_path, init):
    config = json.loads(config_json(FACTS, ["a"], ["a.weight"]))
    (tmp_path / CONFIG).write_text(json.dumps(config | {"init_lora_weights": init}))
    assert read_config(tmp_path)["rank"] == FACTS["rank"]
