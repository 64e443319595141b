"""Hints of a report: batches that divide, smaller clusters, the best number of GPUs, costs, and the next command."""

import json
import re
import shlex

import pytest
import torch

import shardwise as sw
from refusals import refuses
from shardwise.cli.main import main
from shardwise.hardware.cluster import parse_cluster
from shardwise.planner.next_step import read_tokens
from shardwise.planner.search.advice import cluster_option
from shardwise.planner.search.sizes import cluster_sizes
from shardwise.units import format_seconds


def per_device(candidate):
    return candidate.time.samples_per_second / candidate.plan.layout.world_size


def test_a_batch_that_does_not_divide_names_the_nearest_that_do_with_their_gain():
    report = sw.plan("llama3-8b", cluster="48xH100", batch_size=500)
    assert [hint.batch_size for hint in report.hints] == [480, 528]
    for hint in report.hints:
        other = sw.plan("llama3-8b", cluster="48xH100", batch_size=hint.batch_size).answer.best
        assert hint.throughput_ratio == pytest.approx(per_device(other) / per_device(report.answer.best))
        assert hint.throughput_ratio > 1.05
        assert f"(+{hint.throughput_ratio - 1:.0%})" in hint.text


@pytest.mark.parametrize(
    ("model", "cluster", "batch_size"), [("llama3-8b", "48xH100", 480), ("llama-7b", "8xA100-40GB", 64)]
)
def test_a_question_without_a_better_neighbour_has_no_hints(model, cluster, batch_size):
    assert sw.plan(model, cluster=cluster, batch_size=batch_size).hints == ()


@pytest.mark.parametrize(("devices", "batch_size"), [(64, 64), (48, 48)])
def test_a_tiny_model_on_a_large_cluster_is_shown_how_few_devices_do(devices, batch_size):
    report = sw.plan("gpt2-tiny", cluster=f"{devices}xH100", batch_size=batch_size)
    (hint,) = (hint for hint in report.hints if hint.step_s <= 1.1 * report.answer.best.time.seconds)
    few = sw.plan("gpt2-tiny", cluster=f"{hint.num_devices}xH100", batch_size=batch_size).answer.best
    assert hint.num_devices <= 4
    assert few.time.seconds == pytest.approx(hint.step_s)
    assert f"--cluster {hint.num_devices}xH100" in report.to_text()


def test_a_batch_below_the_number_of_devices_leaves_one_idle_and_names_a_batch_for_all():
    report = sw.plan("gpt2", cluster="8xH100", batch_size=7)
    assert (str(report.best.layout), report.answer.num_idle) == ("replicate7", 1)
    (hint,) = report.hints
    assert (hint.batch_size, hint.num_devices) == (8, 8)
    assert hint.throughput_ratio > 1.1
    assert "since 1 of 8 devices stays idle" in hint.text
    assert "1 more device stays idle" in report.to_text()
    assert json.loads(report.to_json())["cluster"]["idle_devices"] == 1


@pytest.mark.parametrize(
    ("model", "cluster", "batch_size", "num_used"),
    [
        ("resnet-50", "8xH100", 7, 1),  # 5.1 ms, and 6.4 ms on 7 devices: a step is launches
        ("t5-base", "8xA100-40GB", 7, 7),
        ("gpt2", "8xH100", 1, 1),
        ("gpt2-tiny", "3xH100", 8, 1),
        ("llama3-8b", "64xH100", 1, 8),
    ],
)
def test_a_batch_that_no_plan_divides_over_all_devices_uses_fewer(model, cluster, batch_size, num_used):
    report = sw.plan(model, cluster=cluster, batch_size=batch_size)
    assert (report.best.layout.world_size, report.exit_code) == (num_used, 0)
    assert report.answer.num_idle == parse_cluster(cluster).num_devices - num_used


def test_a_batch_that_no_plan_divides_is_the_reason_and_not_memory():
    report = sw.plan("t5-11b", cluster="8xA100-40GB", batch_size=1)
    assert (report.best, report.exit_code) == (None, 3)
    assert "no plan of t5-11b divides a batch of 1 evenly over 8 x A100-40GB: use --batch-size 8" in report.advice
    assert sw.plan("t5-11b", cluster="8xA100-40GB", batch_size=8).best is not None


@pytest.mark.parametrize(("devices", "batch_size", "num_used"), [(64, 1000, 40), (8, 100, 5)])
def test_the_gain_of_a_hint_is_that_of_its_numbers(devices, batch_size, num_used):
    report = sw.plan("resnet-50", cluster=f"{devices}xH100", batch_size=batch_size)
    assert report.best.layout.world_size == num_used
    assert report.hints
    for hint in report.hints:
        assert hint.num_devices > num_used
        rates = re.findall(r"([\d,.]+) samples/s each", hint.text)
        after, before = (float(rate.replace(",", "")) for rate in rates)
        assert after / before == pytest.approx(hint.throughput_ratio, rel=0.01)


def test_the_best_number_of_gpus_may_be_any_part_of_a_node():
    report = sw.plan("llama3-8b", cluster="8xH100", batch_size=480, max_gpus=6)
    assert report.best.layout.world_size == 6
    (six,) = (answer for answer in report.sizes if answer.question.cluster.num_devices == 6)
    assert six.best.time.seconds == sw.plan("llama3-8b", cluster="6xH100", batch_size=480).answer.best.time.seconds


def test_the_best_number_of_gpus_is_the_fewest_of_the_fastest():
    report = sw.plan("gpt2", cluster="64xH100", max_gpus=64, batch_size=32)
    seconds = {answer.question.cluster.num_devices: answer.best.time.seconds for answer in report.sizes}
    chosen = report.best.layout.world_size
    assert chosen < 64
    assert seconds[chosen] <= 1.05 * min(seconds.values())
    assert all(seconds[size] > 1.05 * min(seconds.values()) for size in seconds if size < chosen)
    assert json.loads(report.to_json())["sizes"].keys() == set(map(str, seconds))
    assert sw.plan("gpt2", cluster="64xH100", max_gpus=16, batch_size=32).best.layout.world_size == 16


def test_sizes_are_parts_of_a_node_then_whole_nodes_up_to_the_limit():
    node = parse_cluster("8xH100").node
    assert cluster_sizes(node, 6) == [1, 2, 4]
    assert cluster_sizes(node, 40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert cluster_sizes(node, 8 * 100)[-5:] == [8 * count for count in (32, 48, 64, 96, 100)]


@pytest.mark.parametrize("name", ["1xH100", "48xH100", "2xp4d.24xlarge", "2x2xH100", "3xA100-40GB"])
def test_the_option_of_a_cluster_names_it(name):
    cluster = parse_cluster(name)
    assert parse_cluster(cluster_option(cluster)) == cluster


def test_a_budget_of_tokens_is_days_gpu_hours_and_cost():
    report = sw.plan("llama-7b", cluster="8xH100", batch_size=64, tokens="1T", price=2.5)
    best, budget = report.answer.best, report.budget
    assert budget.seconds == pytest.approx(1e12 / (64 * 4096) * best.time.seconds)
    assert budget.gpu_hours == pytest.approx(8 * budget.seconds / 3600)
    assert budget.cost == pytest.approx(2.5 * budget.gpu_hours)
    data = json.loads(report.to_json())["budget"]
    assert data["days"] == pytest.approx(budget.seconds / 86_400)
    assert data["cost"] == budget.cost
    assert "budget" not in json.loads(sw.plan("llama-7b", cluster="8xH100", batch_size=64).to_json())


def test_the_budget_is_of_the_whole_cluster_also_if_devices_stay_idle():
    report = sw.plan("gpt2", cluster="8xH100", batch_size=7, tokens="1B", price=2)
    budget = report.budget
    assert (report.best.layout.world_size, budget.num_gpus, budget.num_idle) == (7, 8, 1)
    assert budget.gpu_hours == pytest.approx(8 * budget.seconds / 3600)
    assert budget.cost == pytest.approx(2 * budget.gpu_hours)
    data = json.loads(report.to_json())["budget"]
    assert (data["cost"], data["gpu_hours"]) == (budget.cost, budget.gpu_hours)
    assert data["idle_gpu_hours"] == pytest.approx(budget.seconds / 3600)
    assert "GPU-hours of all 8 GPUs, 1 of them idle, which cost" in report.to_text()


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1T", 1e12), ("300B", 3e11), ("1.5e12", 1.5e12), ("2_000_000", 2e6), (10**9, 1e9), ("5m", 5e6)],
)
def test_counts_of_tokens_are_read(text, tokens):
    assert read_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "many", "-1T", "0", "1Q", "1e30", "nan"])
def test_other_counts_of_tokens_are_refused(text):
    with refuses("plan.tokens-invalid"):
        read_tokens(text)


def test_the_next_command_writes_the_plan_of_a_model():
    report = sw.plan("llama-7b", cluster="8xH100", batch_size=64, plan="fsdp", set=["micro_batch=1"], compile="blocks")
    argv = shlex.split(report.next_command)
    assert argv[:3] == ["shardwise", "plan", "llama-7b"]
    assert argv[-2:] == ["--out", "plan.toml"]
    assert {"--cluster", "8xH100", "--batch-size", "--set", "micro_batch=1", "--plan", "fsdp"} <= set(argv)
    assert sw.plan("llama-7b", cluster="1xT4").next_command == ""


def test_the_next_command_of_a_plan_file_is_train(tmp_path, capfd):
    path = str(tmp_path / "pl.toml")
    assert main(["plan", "llama-7b", "--cluster", "16xH100", "--batch-size", "64", "--out", path, "--json"]) == 0
    train = f"shardwise train YOUR_JOB.py --hosts hosts.txt --nproc 8 --plan {path}"
    assert json.loads(capfd.readouterr().out)["next"] == train
    report = sw.plan(path)
    assert report.next_command == train
    assert "YOUR_JOB.py is your job with llama-7b and a batch of 64 samples" in report.to_text()
    changed = shlex.split(sw.plan(path, set=["recompute=full"]).next_command)
    assert changed[1] == "plan"
    assert changed[-2:] == ["--out", "plan.toml"]


def job_of(**length):
    return sw.Job(
        model=lambda: sw.models.decoder("llama-tiny"),
        data=lambda split: [(torch.zeros(32, dtype=torch.long), torch.zeros(32, dtype=torch.long))] * 8,
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=0.1),
        batch_size=8,
        **length,
    )


def test_the_length_of_a_job_is_its_budget():
    steps = sw.plan(job_of(steps=100), cluster="2xH100", price=2)
    assert steps.budget.seconds == pytest.approx(100 * steps.answer.best.time.seconds)
    assert steps.budget.cost == pytest.approx(2 * steps.budget.gpu_hours)
    assert f"which cost {steps.budget.cost:.2f} at 2 per GPU-hour" in steps.to_text()
    short = sw.plan(job_of(steps=1), cluster="2xH100")
    assert f"1 step takes {format_seconds(short.budget.seconds)} and" in short.to_text()
    assert sw.plan(job_of(tokens=100 * 8 * 32), cluster="2xH100").budget.steps == 100
    assert sw.plan(job_of(epochs=1), cluster="2xH100").budget is None
    with refuses("cli.option-not-applicable", "--price"):
        sw.plan(job_of(epochs=1), cluster="2xH100", price=2)
    with refuses("plan.tokens-without-sequences", "1T"):
        sw.plan("resnet-50", cluster="2xH100", tokens="1T")
