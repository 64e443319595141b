"""Steps as they are measured: phases add up, memory is counted, a fake world trains like a real one."""

import contextlib
import dataclasses
import gzip
import io
import json
import math
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from refusals import assert_refused, refuses
from shardwise.cli.main import main
from shardwise.launcher.local.function import run_forked
from shardwise.measurement.profile import ProfileSpec, summarize, trace_path
from shardwise.measurement.step import PHASES, PhaseClock, compare, rehearse, training_flops, utilisation
from shardwise.measurement.step_findings import step_findings
from shardwise.planner.trace.trace import describe
from shardwise.plans import Plan


def test_one_rank_of_a_fake_world_is_measured(job):
    measured = rehearse(job, Plan.preset("zero3", 4, batch_size=8), rank=1, steps=3)
    assert (measured.rank, measured.world_size, measured.backend) == (1, 4, "fake")
    assert measured.step.repeats == 3
    assert list(measured.phases) == list(PHASES)
    assert all(seconds > 0 for seconds in measured.phases.values())
    assert measured.tokens_per_s == pytest.approx(16 * measured.samples_per_s)
    parameters = 50 * 32 + 32 * 50 + 50
    assert measured.peak_bytes > 3 * 4 * parameters / 4
    assert 0 < sum(num_bytes for _, num_bytes in measured.at_peak) <= measured.peak_bytes


def test_gradients_that_are_garbage_do_not_keep_a_fake_world_from_its_optimizer(job):
    def never(output, batch):
        return output.sum() * math.nan

    garbage = dataclasses.replace(job, loss=dataclasses.replace(job.loss, sum=never))
    measured = rehearse(garbage, Plan.preset("zero3", 4, batch_size=8), steps=1)
    assert any(text.startswith("optimizer states") for text, _ in measured.at_peak)


def test_phases_add_up_to_the_time_between_their_marks():
    clock = PhaseClock(torch.device("cpu"))
    clock.mark("data", 4)
    for step in (4, 5):
        for phase in ("forward", "backward", "forward", "backward", "settle", "optimizer"):
            clock.mark(phase, step)
        clock.mark("data", step + 1)
        clock.mark("publish", step + 1)  # no part of a step
        clock.mark("data", step + 1)
    first, second = clock.finish()[:2]
    assert set(first) == set(second) == set(PHASES)
    assert all(seconds > 0 for seconds in (*first.values(), *second.values()))
    assert clock.finish() == []


def test_a_sample_costs_three_times_its_forward_products_unless_weights_are_frozen(job):
    shape = describe(job, "fp32").plain
    forward = 2 * 16 * 32 * 50  # one product of 16 tokens
    assert training_flops(shape) == pytest.approx(3 * forward)
    frozen = [
        dataclasses.replace(part, weights=tuple(dataclasses.replace(weight, trained=False) for weight in part.weights))
        for part in shape.parts
    ]
    assert training_flops(dataclasses.replace(shape, parts=tuple(frozen))) == pytest.approx(2 * forward)


def test_utilisation_is_the_worlds_work_over_the_rate_of_all_its_ranks(job):
    measured = rehearse(job, Plan.preset("ddp", 2, batch_size=8), steps=1)
    found = [dataclasses.replace(measured, samples_per_s=rate, matmul_flops=50.0) for rate in (10.0, 12.0)]
    assert utilisation(found, 4.0) == pytest.approx(10.0 * 4.0 / 100.0)


def event(name, began, ended, *, device="CPU", annotation=False, own=None):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=began, end=ended),
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        self_cpu_time_total=ended - began if own is None else own,
    )


def test_kernels_of_a_gpu_are_distinguished_from_communication_and_from_names_of_ranges():
    found = summarize(
        [
            event("gemm", 0, 4, device="CUDA"),
            event("ncclDevKernel_AllReduce", 3, 9, device="CUDA"),
            event("nccl:all_reduce", 3, 9, device="CUDA", annotation=True),
            event("backward", 0, 9, device="CUDA", annotation=True),
            event("aten::mm", 0, 1),
        ],
        on_gpu=True,
    )
    assert found.compute == [(0, 4e-6)]
    assert found.communication == [(3e-6, 9e-6)]
    assert list(found.own) == ["gemm", "ncclDevKernel_AllReduce"]


def test_operators_that_wait_for_gloo_do_not_compute():
    found = summarize(
        [
            event("aten::mm", 0, 4, own=3),
            event("torch::autograd::AccumulateGrad", 4, 9),
            event("c10d::allreduce_", 4, 9),
            event("gloo:all_reduce", 3, 9, annotation=True, own=0),
            event("SharedNorm", 9, 12),
        ],
        on_gpu=False,
    )
    assert found.compute == [(0, 4e-6)]
    assert found.communication == [(3e-6, 9e-6)]
    assert found.own["aten::mm"] == (1, 3e-6)
    assert found.own["gloo:all_reduce"] == (1, pytest.approx(6e-6))


def test_several_ranks_leave_a_trace_each(tmp_path):
    assert trace_path(tmp_path / "t.json", 0, 1) == tmp_path / "t.json"
    assert trace_path(tmp_path / "t.json.gz", 3, 4) == tmp_path / "t.rank3.json.gz"
    assert trace_path(tmp_path / "a.b.json", 3, 4) == tmp_path / "a.b.rank3.json"


def test_a_profile_names_what_takes_the_time_and_its_trace_has_the_phases(job, tmp_path):
    spec = ProfileSpec(steps=2, trace=tmp_path / "trace.json.gz")
    profile = rehearse(job, Plan.preset("ddp", 2, batch_size=8), steps=1, profile=spec).profile
    assert (profile.kind, profile.steps, profile.communication_s) == ("operators", 2, 0)
    assert 0 < profile.compute_s <= profile.seconds
    own = [kernel.seconds for kernel in profile.top]
    assert own == sorted(own, reverse=True)
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {kernel.name for kernel in profile.top} <= {event["name"] for event in events}
    shown = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [shown.count(phase) for phase in ("forward", "backward", "optimizer")] == [2, 2, 2]
    assert "data" in shown


def test_predictions_stand_beside_what_they_predict(job):
    measured = rehearse(job, Plan.preset("ddp", 2, batch_size=8), steps=1)
    rows = {name: (value, predicted) for name, value, predicted in compare(measured, {"peak_bytes": 1.0})}
    assert rows["peak_bytes"] == (measured.peak_bytes, 1.0)
    assert rows["step_s"] == (measured.step.median_s, None)


def test_a_rank_outside_the_world_is_refused(job):
    with refuses("bench.rank-out-of-range", "0 to 1"):
        rehearse(job, Plan.preset("ddp", 2, batch_size=8), rank=2)


@pytest.mark.prove
def test_two_real_ranks_are_measured_from_the_command_line(job_file, tmp_path):
    command = [sys.executable, "-m", "shardwise", "bench", "step", str(job_file), "--nproc", "2", "--steps", "2"]
    outputs = ["--trace", tmp_path / "trace.json", "--report", tmp_path / "report.md", "--json"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--backend", "gloo", *outputs],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    printed = json.loads(done.stdout)
    assert [(rank["rank"], rank["backend"], rank["plan"]) for rank in printed["measured"]] == [
        (0, "gloo", "replicate2"),
        (1, "gloo", "replicate2"),
    ]
    assert printed["utilisation"] > 0
    for rank, measured in enumerate(printed["measured"]):
        profile = measured["profile"]
        assert profile["trace"] == str(tmp_path / f"trace.rank{rank}.json")
        assert 0 <= profile["exposed_s"] <= profile["communication_s"]
        assert profile["communication_s"] > 0
        events = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())["traceEvents"]
        assert any(event["name"].startswith("gloo:") for event in events)
    report = (tmp_path / "report.md").read_text()
    assert "A step of plan replicate2 on 2 ranks" in report
    assert "gloo:all_reduce" in report


def test_ranks_of_another_launcher_are_joined_and_rank_zero_speaks(job_file):
    def body(rank):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = main(["bench", "step", str(job_file), "--device", "cpu", "--steps", "1", "--json"])
        return code, printed.getvalue()

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (code, printed), other = run_forked(body, 2, timeout_s=60, extra={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert (code, other) == (0, (0, ""))
    assert [measured["world_size"] for measured in json.loads(printed)["measured"]] == [2, 2]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--rank", "1"], ("cli.option-not-applicable", "--fake-world N")),
        (["--fake-world", "2", "--nproc", "2"], ("cli.options-conflict", "--fake-world", "--nproc")),
        (["--fake-world", "2", "--rank", "2"], ("bench.rank-out-of-range", "0 to 1")),
        (["--fake-world", "0"], ("", "--fake-world")),
        (["--fake-world", "2", "--plan", "pp"], ("bench.fake-world-pipeline", "--nproc 2")),
        (["--plan", "zero9"], ("plan.unknown-preset", "zero9")),
        (["--trace", "steps.txt"], ("bench.trace-extension", ".json or .json.gz")),
        (["--trace", "nowhere/steps.json"], ("cli.output-folder-missing", "mkdir -p nowhere")),
        (["--report", "steps.txt"], ("bench.report-extension", ".html", ".md")),
    ],
)
def test_bad_input_gets_one_sentence(job_file, capsys, options, refusal):
    assert main(["bench", "step", str(job_file), "--device", "cpu", *options]) == 2
    complaint = capsys.readouterr().err
    assert_refused(complaint, *refusal)
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("option", ["--nproc", "--fake-world"])
def test_a_rank_of_another_launcher_starts_no_ranks(job_file, capsys, monkeypatch, option):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "step", str(job_file), option, "2"]) == 2
    assert_refused(capsys.readouterr().err, "cli.option-inside-world", option, "torchrun")


def test_the_table_shows_figures_in_their_units_and_the_kernels(job_file, capsys):
    options = ["--device", "cpu", "--fake-world", "2", "--steps", "1", "--profile"]
    assert main(["bench", "step", str(job_file), *options]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("plan replicate2 · rank 0 of 2 (fake world) · CPU")
    for text in (" ms", " MiB", " GFLOP/s", "utilisation", "profiled 3 steps", "aten::"):
        assert text in shown


def test_findings_contain_every_rank_and_report_when_the_others_were_fake(job):
    measured = rehearse(job, Plan.preset("ddp", 2, batch_size=8), steps=1, profile=ProfileSpec(steps=1))
    ranks = [measured, dataclasses.replace(measured, rank=1)]
    findings = step_findings(ranks, predicted={"step_s": 1.0}, used=0.5, facts=(("host", "here"),))
    assert "50% of the measured matmul rate" in findings.verdict
    assert any("fake" in sentence for sentence in findings.method)
    time, figures, memory, profile = findings.sections
    assert (
        [name for name, _ in time.parts[0].rows] == [name for name, _ in profile.parts[0].rows] == ["rank 0", "rank 1"]
    )
    assert ("step", "1,000.00 ms") in [(row[0], row[2]) for row in figures.parts[0].rows]
    assert memory.parts[0].rows
