"""A plan of one's own is resolved as `train` resolves it, predicted, refused by its rules, and compared."""

import dataclasses
import json

import pytest

import shardwise as sw
from refusals import refuses
from shardwise.errors import InputError
from shardwise.hardware.cluster import parse_cluster
from shardwise.planner.asked import predict_asked
from shardwise.planner.next_step import plan_options
from shardwise.planner.search.subject import job_rules, published_subject
from shardwise.planner.settle import LocalDevice, settle
from shardwise.plans import Plan, Precision

LLAMA = {"cluster": "8xH100", "batch_size": 64, "length": 1024}


def asked(plan="auto", *settings, model="llama-7b", **options):
    return sw.plan(model, plan=plan, set=settings, **LLAMA | options)


@pytest.fixture(scope="module")
def fsdp():
    return asked("fsdp", "micro_batch=1", "recompute=full")


def test_a_preset_with_overrides_is_predicted_beside_the_recommended_plan(fsdp):
    plan = fsdp.asked.plan
    assert (str(plan.layout), plan.zero, plan.micro_batch, plan.accumulation) == ("shard8", 3, 1, 8)
    assert plan.recompute == "full"
    assert fsdp.asked.fits
    assert fsdp.exit_code == 0
    data = json.loads(fsdp.to_json())["asked"]
    assert data["fits"] is True
    assert data["memory"]["total_bytes"] == fsdp.asked.candidate.memory.total
    assert data["time"]["step_s"] == pytest.approx(sum(data["time"]["parts_s"].values()))
    assert data["time"]["step_s"] > json.loads(fsdp.to_json())["best"]["time"]["step_s"]


def test_the_prediction_of_a_candidate_is_that_of_the_search():
    report = sw.plan("llama-7b", **LLAMA)
    for candidate in report.candidates[:5]:
        again = predict_asked(candidate.plan, report.answer.question)
        assert again.candidate == candidate


def test_the_recommended_plan_is_recognized():
    best = sw.plan("llama-7b", **LLAMA).best
    name, settings = plan_options(best, parse_cluster("8xH100"))
    report = asked(name, *settings)
    assert report.asked.plan == best
    assert "recommended plan" in json.loads(report.to_json())["asked"]["verdict"]


def test_settings_without_a_plan_are_fixed_before_the_search():
    report = asked("auto", "recompute=full", "communication.bucket_mb=50", compile="blocks")
    assert report.asked.fits
    mine = report.asked.plan
    assert (mine.recompute, mine.recompute_blocks, mine.compile) == ("full", 0, "blocks")
    assert mine.communication.bucket_mb == 50
    for candidate in report.candidates:
        if (candidate.family, candidate.plan.recompute) == (report.asked.candidate.family, "full"):
            assert report.asked.candidate.time.seconds <= 1.01 * candidate.time.seconds
    assert report.best.recompute == "none"  # the recommended plan is searched without recompute and bucket_mb


def test_states_of_eight_bits_are_searched_where_only_they_fit_without_offload():
    report = sw.plan("llama3-8b", cluster="4xA100-40GB", batch_size=64, set=["precision.optimizer=int8"])
    assert (report.exit_code, report.asked.candidate.family) == (0, "zero3")
    assert report.asked.plan.precision.optimizer == "int8"
    assert report.asked.plan == report.best
    free = sw.plan("llama3-8b", cluster="4xA100-40GB", batch_size=64).answer.best
    assert free.family == "offload"
    assert report.asked.candidate.time.seconds < free.time.seconds


def test_states_of_eight_bits_are_searched_without_their_library(monkeypatch):
    monkeypatch.setattr("shardwise.parallel.support.find_spec", lambda _: None)
    report = sw.plan("llama3-8b", cluster="4xA100-40GB", batch_size=64, set=["precision.optimizer=int8"])
    assert (report.exit_code, report.best.precision.optimizer) == (0, "int8")
    refused = [reason for reason in report.rejected.values() if "torchao" in reason]
    assert refused == []


def test_bf16_parameters_are_searched_with_the_rules_for_their_gradients():
    report = sw.plan("llama-7b", cluster="8xA100-40GB", set=["precision.parameter=bf16"])
    assert (report.exit_code, report.best.precision.parameter) == (0, "bf16")
    assert report.asked.plan == report.best


def test_compiled_plans_are_searched_compiled():
    options = {"cluster": "8xA100-40GB", "batch_size": 64}
    report = sw.plan("llama-7b", compile="blocks", **options)
    whole = sw.plan("llama-7b", compile="blocks", set=["recompute=none"], **options)
    assert report.asked.plan == report.best
    assert report.asked.candidate.time.seconds <= whole.asked.candidate.time.seconds
    assert {candidate.plan.compile for candidate in report.candidates} == {"blocks"}
    assert json.loads(report.to_json())["best"]["plan"]["compile"] == "blocks"
    compared = sw.plan("llama-7b", plan="fsdp", set=["micro_batch=1"], compile="blocks", **options)
    assert compared.answer.best == report.answer.best  # compiled, as the user's own plan


def test_plans_of_a_given_zero_stage_are_searched():
    report = asked("auto", "zero=1")
    assert (report.exit_code, report.asked.plan.zero, report.best.zero) == (0, 1, 2)
    stages = [candidate for candidate in report.candidates if candidate.plan.zero == 1]
    assert report.asked.candidate.time.seconds <= 1.01 * min(each.time.seconds for each in stages)


def test_a_preset_on_a_cpu_takes_a_micro_batch_that_fits():
    report = sw.plan("gpt2", cluster="2xcpu", batch_size=512, max_memory="8GB", compile="blocks")
    assert (report.exit_code, report.asked.fits) == (0, True)
    assert report.asked.default.memory.total > 8e9


def test_a_compute_dtype_and_the_dtype_of_states_are_both_used():
    precision = asked("auto", "precision.optimizer=bf16", precision="fp32").asked.plan.precision
    assert (precision.compute, precision.optimizer) == ("fp32", "bf16")


@pytest.mark.parametrize(
    ("plan", "settings", "code"),
    [
        ("tp", [], "plan.tp-not-divisible"),
        ("pp48", [], "plan.pipeline-too-many-stages"),
        ("cp", [], "plan.cp-heads-not-divisible"),
        ("pp2.shard24", ["pipeline.schedule=zbv"], "support.split-backward-sharded"),
        ("ddp", ["offload.parameters=cpu"], "support.offload-whole-parameters"),
        ("tp2.shard24", ["engine=deepspeed", "micro_batch=1"], "support.deepspeed-axis"),
        ("zero3", ["engine=deepspeed", "fused_loss=true"], "support.deepspeed-option"),
    ],
)
def test_a_plan_that_train_refuses_names_the_rule(plan, settings, code):
    report = asked(plan, *settings, model="gpt2", cluster="48xH100", batch_size=96, length=1024)
    assert (report.asked.fits, report.asked.candidate, report.exit_code) == (False, None, 3)
    assert report.asked.code == code
    assert report.best is not None
    assert report.asked.refusal in report.to_text()
    assert report.asked.refusal in report.note()


@pytest.mark.parametrize(
    ("model", "layout", "micro_batch"),
    [("gpt2", "ddp", 16), ("gpt2-medium", "ddp", 16), ("gpt2-medium", "shard4.tp2", 16), ("llama-tiny", "ddp", 16)],
)
def test_published_models_in_float8_follow_the_rules_of_a_job_with_the_same_model(model, layout, micro_batch):
    cluster = parse_cluster("8xH100")
    plan = dataclasses.replace(Plan.preset(layout, 8), micro_batch=micro_batch, precision=Precision(compute="float8"))
    job = sw.Job(
        model=lambda: sw.models.decoder(model),
        data=sw.datasets.text(length=64),
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=8 * micro_batch,
        steps=1,
    )
    refusals = []
    for accepts in (published_subject(model, cluster).accepts, job_rules(job)):
        try:
            accepts(plan)
            refusals.append(("", ""))
        except InputError as error:
            refusals.append((error.code, error.fact))
    assert refusals[0] == refusals[1]


def test_float8_products_of_published_models_require_a_multiple_of_16_tokens():
    report = asked("ddp", "micro_batch=1", "precision=float8", model="gpt2-xl", length=1000)
    assert report.asked.code == "support.float8-tokens"


def test_a_refused_plan_names_its_rule_although_no_plan_fits():
    report = asked("ddp", "precision=float8", model="gpt2", cluster="2xH100", batch_size=4)
    assert (report.exit_code, report.asked.code) == (3, "support.float8-no-layer")
    assert report.asked.refusal in report.note()
    assert "the narrowest of 48 has 768" in report.advice  # a larger cluster would not help


def test_a_plan_that_is_too_large_names_options_with_which_it_fits():
    report = asked("fsdp", "micro_batch=8", batch_size=512, length=4096)
    assert not report.asked.fits
    assert report.chosen is None
    again = asked("fsdp", *report.asked.settings, batch_size=512, length=4096)
    assert again.asked.fits
    assert again.asked.candidate == report.asked.leaner
    with refuses("plan.none-fits"):
        report.to_toml()


@pytest.mark.parametrize(
    ("question", "options"),
    [
        (("llama3-8b", "8xH100", 512, "fsdp", "micro_batch=2"), {"gradient_sync", "recompute"}),
        (("llama3-405b", "16384xH100", 2048, "pp16.shard128.tp8", "micro_batch=1"), {"pipeline.schedule"}),
        (("llama3-8b", "8xH100", 256, "shard4.cp2", "micro_batch=16"), {"micro_batch"}),
    ],
)
def test_the_options_with_which_a_plan_fits_are_the_fastest_of_its_layout(question, options):
    model, cluster, batch, plan, setting = question
    report = sw.plan(model, cluster=cluster, batch_size=batch, plan=plan, set=[setting])
    own = report.asked
    assert not own.fits
    assert options <= {setting.partition("=")[0] for setting in own.settings}
    assert own.leaner.plan.layout == own.plan.layout
    assert all(setting in own_verdict(report) for setting in own.settings)
    for candidate in report.candidates:
        mine, theirs = own.leaner.plan, candidate.plan
        if (theirs.layout, theirs.zero, theirs.pipeline.split) == (mine.layout, mine.zero, ()):
            assert own.leaner.time.seconds <= 1.01 * candidate.time.seconds


def own_verdict(report):
    return json.loads(report.to_json())["asked"]["verdict"]


def test_a_preset_takes_the_fastest_micro_batch_that_fits():
    report = sw.plan("llama3-8b", cluster="8xH100", plan="fsdp", set=["recompute=full"])
    own, default = report.asked, report.asked.default
    assert own.fits
    assert (default.plan.micro_batch, default.plan.accumulation) == (64, 1)
    assert own.plan == dataclasses.replace(
        default.plan, micro_batch=own.plan.micro_batch, accumulation=64 // own.plan.micro_batch
    )
    for micro_batch in (1, 2, 4):
        settings = [f"micro_batch={micro_batch}", "recompute=full"]
        other = sw.plan("llama3-8b", cluster="8xH100", plan="fsdp", set=settings).asked
        assert not other.fits or other.candidate.time.seconds >= own.candidate.time.seconds
    text = report.to_text()
    assert "train takes 64 x 1 by default, which needs " in text
    assert f"pass --set micro_batch={own.plan.micro_batch} to it" in text
    assert asked("fsdp").asked.default is None


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_setting_recompute_of_the_recommended_plan_is_for_all_its_blocks(recompute):
    report = sw.plan("llama3-8b", cluster="8xH100", set=[f"recompute={recompute}"])
    assert report.best.recompute_blocks > 0
    assert report.asked.refusal == ""
    assert (report.asked.plan.recompute, report.asked.plan.recompute_blocks) == (recompute, 0)
    kept = sw.plan("llama3-8b", cluster="8xH100", set=["recompute=full", "recompute_blocks=3"])
    assert kept.asked.plan.recompute_blocks == 3


def test_every_option_of_ones_own_plan_is_printed():
    changed = ["micro_batch=1", "recompute=full", "recompute_blocks=3", "capture=step", "communication.bucket_mb=50"]
    text = asked("fsdp", *changed).to_text()
    (line,) = (line for line in text.splitlines() if line.startswith("yours     "))
    assert "recompute full of 3" in line
    assert "capture step · communication.bucket_mb 50" in line
    assert "sequence_parallel true" in asked("shard4.tp2", "micro_batch=1", "sequence_parallel=true").to_text()


def test_a_limit_of_memory_binds_the_search_and_ones_own_plan():
    free, limited = sw.plan("llama-7b", **LLAMA), sw.plan("llama-7b", max_memory="20GB", **LLAMA)
    assert free.answer.best.memory.total > 20e9 >= limited.answer.best.memory.total
    assert all(candidate.memory.total <= 20e9 for candidate in limited.candidates)
    assert not asked("zero2", "micro_batch=1", max_memory="20GB").asked.fits


def test_precision_of_ones_own_plan_is_that_of_the_comparison():
    report = asked("fsdp", "micro_batch=1", "precision=fp32")
    assert report.asked.plan.precision.compute == "fp32"
    assert report.best.precision == report.asked.plan.precision
    assert report.asked.question.model.plain.compute == "fp32"
    assert asked("fsdp", "micro_batch=1", precision="fp32").asked.plan.precision == report.asked.plan.precision


def test_a_plan_file_is_predicted_again_by_its_name(tmp_path, fsdp):
    path = tmp_path / "plan.toml"
    path.write_text(fsdp.to_toml())
    again = sw.plan(str(path))
    assert again.asked.plan == fsdp.asked.plan
    assert again.asked.candidate == fsdp.asked.candidate
    assert again.answer.question.batch_size == 64
    changed = sw.plan(str(path), set=["recompute=none"])
    assert changed.asked.plan.recompute == "none"
    with refuses("plan.world-size-mismatch", 8, 4):
        sw.plan(str(path), cluster="4xH100")
    with refuses("cli.options-conflict", "fp32", "bf16"):
        sw.plan("llama-7b", cluster="8xH100", plan=str(path), precision="fp32")


@pytest.fixture(scope="module")
def deepspeed():
    return sw.plan("llama-7b", cluster="8xH100", batch_size=64, engine="deepspeed")


def test_a_plan_for_deepspeed_is_predicted_again_from_its_file(tmp_path, deepspeed):
    path = tmp_path / "plan.toml"
    path.write_text(deepspeed.to_toml())
    again = sw.plan(str(path))
    form = next(form for form in deepspeed.forms if form.best is not None and form.best.plan == deepspeed.best)
    assert again.asked.plan.engine == "deepspeed"
    assert again.asked.candidate == form.best
    assert again.exit_code == 0
    assert json.loads(again.to_json())["asked"]["plan"]["engine"] == "deepspeed"
    assert "deepspeed" in again.to_html()
    large = sw.plan(str(path), set=["micro_batch=8", "accumulation=1", "zero=1"], max_memory="20GB")
    assert (large.asked.fits, large.asked.leaner, large.exit_code) == (False, None, 3)
    with refuses("plan.unknown-choice"):
        asked("auto", "engine=horovod")


def test_the_report_for_deepspeed_describes_the_plan_that_it_writes(deepspeed):
    chosen = [line for line in deepspeed.to_text().splitlines() if line.startswith("chosen ")]
    assert len(chosen) == 1
    assert all(text in chosen[0] for text in ("deepspeed zero2", "shard8", "engine deepspeed"))
    assert f"{deepspeed.best.micro_batch} x {deepspeed.best.accumulation}" in chosen[0]
    data = json.loads(deepspeed.to_json())["chosen"]
    assert (data["plan"]["engine"], data["plan"]["zero"]) == ("deepspeed", deepspeed.best.zero)
    assert "deepspeed zero2 (chosen)" in deepspeed.to_html()
    with refuses("cli.options-conflict", "--engine deepspeed", "compile"):
        asked("auto", engine="deepspeed", compile="blocks")


def test_a_batch_below_the_devices_names_the_options_of_plan():
    with refuses("plan.batch-too-small", "--batch-size 8 or more", "--cluster of at most 4 devices"):
        asked("fsdp", batch_size=4)


def settings_of(options):
    return dict(option.partition("=")[::2] for option in options)


@pytest.mark.parametrize(
    ("model", "cluster", "options"),
    [
        ("llama-7b", "8xH100", {"batch_size": 64}),
        ("gpt2", "4xT4", {"batch_size": 32}),
        ("llama-70b", "8xH100", {"batch_size": 64}),
        ("llama3-8b", "8xH100", {"batch_size": 16, "length": 32_768}),
        ("gpt2-tiny", "2xcpu", {"batch_size": 8}),
    ],
)
def test_the_options_of_the_train_command_resolve_to_the_plan(model, cluster, options):
    report = sw.plan(model, cluster=cluster, **options)
    where = report.answer.question.cluster
    kind = "cpu" if where.device.kind == "cpu" else "cuda"
    device = LocalDevice(kind=kind, has_bf16=where.device.has_bf16, name=where.device.name)
    assert report.candidates
    for candidate in report.candidates:
        name, settings = plan_options(candidate.plan, where)
        world_size, batch = where.num_devices, candidate.plan.batch_size
        overrides = settings_of(settings)
        assert (
            settle(name, batch_size=batch, world_size=world_size, device=device, overrides=overrides) == candidate.plan
        )


def test_every_field_of_a_plan_is_written_as_an_option():
    plan = Plan.preset("fsdp", 4, batch_size=8, compile="blocks", fused_loss=True, communication={"bucket_mb": 50})
    name, settings = plan_options(plan, parse_cluster("4xH100"))
    assert name == "zero3"
    assert settings_of(settings) == {
        "compile": "blocks",
        "fused_loss": "true",
        "communication.bucket_mb": "50",
        "precision.compute": "fp32",
    }
