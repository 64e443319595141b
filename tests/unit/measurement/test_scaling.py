"""Scaling: efficiency is arithmetic on throughputs, jobs and scripts are measured alike, and limits are named."""

import json
import re

import pytest

from refusals import assert_refused, refuses
from shardwise.cli.main import main
from shardwise.errors import RankFailedError
from shardwise.launcher.local.target import Script
from shardwise.measurement.scaling import (
    ScalingCurve,
    ScalingPoint,
    find_rates,
    measure_script,
    plan_for,
    powers_of_two,
    read_pattern,
)
from shardwise.measurement.scaling_report import SharedResources, limits, scaling_findings, scaling_table, verdict
from shardwise.planner.settle import LocalDevice
from shardwise.plans import Plan
from shardwise.plans.toml import plan_to_toml

SCRIPT = """
import os, sys
for step in range(4):
    if os.environ["RANK"] == "0":
        print(f"step {step}: {1000 * int(os.environ['WORLD_SIZE']) + step:,} rows/s of {sys.argv[1]}")
"""


@pytest.fixture
def script_file(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def point(ranks, per_s, spread=0.02, **parts):
    return ScalingPoint(ranks=ranks, per_s=per_s, spread=spread, batch_size=8, plan="ddp", parts=parts or None)


def curve(*points, mode="strong"):
    return ScalingCurve(mode=mode, unit="samples/s", points=points)


def test_efficiency_is_throughput_over_that_of_as_many_first_ranks():
    strong = curve(point(1, 100.0), point(2, 150.0), point(4, 200.0))
    assert [strong.efficiency(each) for each in strong.points] == [1.0, 0.75, 0.5]
    assert strong.efficiency_spread(strong.points[1]) == pytest.approx(0.75 * 0.04)
    assert strong.efficiency_spread(strong.points[0]) is None
    from_two = curve(point(2, 150.0), point(4, 240.0))
    assert from_two.efficiency(from_two.points[1]) == pytest.approx(0.8)


def test_what_grows_is_what_the_ideal_would_not_have():
    first = {"compute": 0.040, "communication": 0.0, "data": 0.002, "idle": 0.0}
    second = {"compute": 0.022, "communication": 0.006, "data": 0.002, "idle": 0.001}
    strong = curve(point(1, 100.0, **first), point(2, 140.0, **second))
    assert strong.growth(strong.points[1]) == pytest.approx(
        {"compute": 0.002, "communication": 0.006, "data": 0.001, "idle": 0.001}
    )
    weak = curve(point(1, 100.0, **first), point(2, 140.0, **{**second, "compute": 0.041}), mode="weak")
    assert weak.growth(weak.points[1])["compute"] == pytest.approx(0.001)


def test_limits_name_shared_cores_and_the_part_that_costs_most():
    first = {"compute": 0.040, "communication": 0.0, "data": 0.0, "idle": 0.0}
    second = {"compute": 0.021, "communication": 0.006, "data": 0.0, "idle": 0.0}
    strong = curve(point(1, 100.0, **first), point(2, 140.0, **second))
    [text] = limits(strong, SharedResources(cores=2))
    assert text.startswith("2 ranks: 70% ± 3% of ideal; they share the 2 cores that 1 rank used;")
    assert text.endswith("; the largest loss is exposed communication (+6.0 ms per step)")
    assert "they share 1 GPU;" in limits(strong, SharedResources(gpus=1))[0]
    assert "share" not in limits(strong, SharedResources(gpus=2))[0]
    assert "share" not in limits(strong, SharedResources(cores=2, threads=1))[0]
    assert "they share 2 cores, with 2 threads each;" in limits(strong, SharedResources(cores=2, threads=2))[0]
    good = curve(point(1, 100.0), point(2, 198.0))
    assert limits(good, SharedResources(gpus=2)) == ["2 ranks: 99% ± 4% of ideal; close to ideal"]


def test_a_noisy_measurement_has_no_verdict():
    noisy = curve(point(1, 100.0, spread=0.5), point(2, 300.0, spread=0.5))
    assert limits(noisy, SharedResources(gpus=2))[0].endswith("times vary too much for an analysis")
    assert "times vary too much (efficiency" in verdict([noisy])


def test_a_report_draws_the_measured_beside_the_ideal_and_the_predicted():
    predicted = ScalingPoint(ranks=2, per_s=150.0, spread=0.0, predicted_per_s=180.0, parts=None)
    strong = curve(point(1, 100.0, compute=0.04, communication=0.0, data=0.0, idle=0.0), predicted)
    findings = scaling_findings([strong], title="digits", facts=(), notes=[["2 ranks: slow"]])
    table, plot, bars = findings.sections[0].parts
    assert table == scaling_table(strong)
    assert [(line.name, line.points, line.dashed) for line in plot.series] == [
        ("measured", ((1, 100.0), (2, 150.0)), False),
        ("ideal", ((1, 100.0), (2, 200.0)), True),
        ("predicted", ((2, 180.0),), True),
    ]
    assert bars.rows == (("1 rank", (40.0, 0.0, 0.0, 0.0)),)
    assert findings.verdict == verdict([strong])
    assert findings.verdict == "strong: 2 ranks have 1.50 times the throughput of 1 (efficiency 75% ± 2%)."


def test_ranks_double_up_to_the_most():
    assert [powers_of_two(most) for most in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2), (1, 2, 4, 8)]


def batches(spec, mode):
    plans = [plan_for(spec, mode, ranks, batch_size=8, device=LocalDevice(), overrides={}) for ranks in (1, 2, 4)]
    return [(plan.layout.world_size, plan.batch_size, plan.micro_batch) for plan in plans]


def test_strong_scaling_keeps_the_global_batch_and_weak_scaling_each_ranks():
    assert batches("zero3", "strong") == [(1, 8, 8), (2, 8, 4), (4, 8, 2)]
    assert batches("zero3", "weak") == [(1, 8, 8), (2, 16, 8), (4, 32, 8)]


def test_a_plan_file_is_refitted(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(plan_to_toml(Plan.preset("zero3", 2, batch_size=8)))
    assert batches(str(path), "strong") == [(1, 8, 4), (2, 8, 4), (4, 8, 2)]
    assert batches(str(path), "weak") == [(1, 4, 4), (2, 8, 4), (4, 16, 4)]


def test_rates_are_read_without_the_first_which_warms_up():
    pattern = read_pattern(r"([0-9.,]+) rows/s")
    assert find_rates(pattern, "1,000.5 rows/s") == [1000.5]
    assert find_rates(pattern, "1 rows/s\n2 rows/s\n3 rows/s") == [2.0, 3.0]
    with refuses("bench.pattern-not-number"):
        find_rates(re.compile("(x)"), "x")


def test_a_script_is_measured_by_what_it_prints_and_by_the_clock(script_file, tmp_path, capsys):
    command = ["bench", "scaling", "--ranks", "2,1", "--rounds", "1", "--json"]
    pattern, report = ["--pattern", "([0-9,]+) rows/s"], ["--report", str(tmp_path / "report.md")]
    assert main([*command, *pattern, *report, str(script_file), "its-own"]) == 0
    [printed] = json.loads(capsys.readouterr().out)["curves"]
    assert [each["ranks"] for each in printed["points"]] == [1, 2]
    assert [each["per_s"] for each in printed["points"]] == pytest.approx([1002, 2002])
    assert printed["points"][1]["efficiency"] == pytest.approx(2002 / 2004)
    assert "Throughput as printed" in (tmp_path / "report.md").read_text()
    timed = measure_script(Script(str(script_file), ("its-own",)), [1], rounds=1, mode="weak", pattern=None)
    assert timed.points[0].per_s > 0
    assert timed.points[0].spread is None  # one round has none
    assert timed.note.startswith("start-up time of ranks subtracted: ")


def test_a_script_that_fails_is_named_with_its_message(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text("raise RuntimeError('no such luck')")
    with refuses("bench.script-failed", "no such luck", kind=RankFailedError):
        measure_script(Script(str(path)), [1], rounds=1, mode="strong", pattern=None)


@pytest.mark.prove
def test_a_job_is_measured_on_one_and_two_ranks_from_the_command_line(job_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two of them on busy cores would wait for each other most of the time
    command = ["bench", "scaling", "--ranks", "1,2", "--rounds", "1", "--json", "--device", "cpu", "--plan", "zero3"]
    assert main([*command, "--report", str(tmp_path / "report.html"), str(job_file)]) == 0
    strong, weak = json.loads(capsys.readouterr().out)["curves"]
    assert [(each["ranks"], each["batch_size"], each["plan"]) for each in strong["points"]] == [
        (1, 8, "one"),
        (2, 8, "shard2"),
    ]
    assert [each["batch_size"] for each in weak["points"]] == [8, 16]
    assert strong["points"][0] == weak["points"][0]
    assert strong["points"][0]["parts"]["communication"] == 0
    assert all(each["parts"]["compute"] > 0 and each["predicted_per_s"] > 0 for each in strong["points"])
    assert strong["limits"][0].startswith("2 ranks: ")
    assert "Strong scaling" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--ranks", "1,x"], ("cli.number-list-invalid", "--ranks", "'1,x'")),
        (["--ranks", "0"], ("cli.number-list-invalid", "--ranks", "'0'")),
        (["--ranks", "1,2", "--nproc", "2"], ("cli.options-conflict", "--ranks", "--nproc")),
        (["--ranks", "1,3"], ("plan.batch-not-divisible", "batch_size")),
        (["--plan", "tp2", "--ranks", "1,2"], ("layout.world-size-mismatch", "tp2")),
        (["--report", "report.pdf"], ("bench.report-extension", ".html", ".md")),
        (["--set", "nothing=1"], ("cli.set-unknown-key", "nothing")),
    ],
)
def test_bad_input_about_a_job_gets_one_sentence(job_file, capsys, options, refusal):
    assert main(["bench", "scaling", "--device", "cpu", *options, str(job_file)]) == 2
    shown = capsys.readouterr().err
    assert_refused(shown, *refusal)
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--pattern", "(a)(b)"], ("bench.pattern-group-count", 2)),
        (["--pattern", "("], ("bench.pattern-not-regex", "--pattern")),
        (["--plan", "ddp"], ("cli.option-not-applicable", "--plan")),
        (["--pattern", "(a)", "--mode", "weak"], ("cli.options-conflict", "--mode weak", "--pattern")),
    ],
)
def test_bad_input_about_a_script_gets_one_sentence(script_file, capsys, options, refusal):
    assert main(["bench", "scaling", *options, str(script_file)]) == 2
    shown = capsys.readouterr().err
    assert_refused(shown, *refusal)
    assert shown.count("\n") == 1


def test_a_file_that_is_missing_or_not_python_is_refused(tmp_path, capsys):
    assert main(["bench", "scaling", str(tmp_path / "nothing.py")]) == 2
    assert_refused(capsys.readouterr().err, "cli.file-not-found", "nothing.py")
    (tmp_path / "text.py").write_text("plain text")
    assert main(["bench", "scaling", str(tmp_path / "text.py")]) == 2
    assert_refused(capsys.readouterr().err, "cli.not-python", "text.py")


def test_a_rank_of_another_launcher_does_not_start_ranks(job_file, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "scaling", str(job_file)]) == 2
    assert_refused(capsys.readouterr().err, "cli.starts-own-ranks", "torchrun")
