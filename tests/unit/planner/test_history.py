"""Runs that were trained correct later predictions for the same machine, within bounds, and for no other."""

import dataclasses
import json
import threading

import msgspec
import pytest

from jobs import sentences_job
from shardwise.hardware.cluster import parse_cluster
from shardwise.hardware.probe import package_version
from shardwise.planner.cost.time import KNOWN
from shardwise.planner.history import (
    LEAST_RUNS,
    MachineHistory,
    RunRecord,
    append_record,
    corrected,
    history_path,
    median_ratio,
    read_history,
    record_of,
    with_memory_margin,
)
from shardwise.planner.plan import plan
from shardwise.planner.search.advice import compile_gain, hints
from shardwise.plans.plan import Plan
from shardwise.testing import run_ranks
from shardwise.training import comparison
from shardwise.training.comparison import median_step
from shardwise.training.loop import train

MACHINE = parse_cluster("8xA100-40GB")


def a_record(ratio=1.2, **changes):
    fields = {
        "at": 0.0,
        "device": "A100-40GB",
        "num_devices": 8,
        "torch": package_version("torch"),
        "shardwise": package_version("shardwise"),
        "model": "llama-7b",
        "family": "zero3",
        "compute": "bf16",
        "compile": "none",
        "predicted_step_s": 2.0,
        "measured_step_s": 2.0 * ratio,
        "predicted_bytes": 10e9,
        "measured_bytes": 11e9,
    }
    return RunRecord(**{**fields, **changes})


@pytest.fixture(scope="module")
def report():
    return plan("llama-7b", cluster="8xA100-40GB", batch_size=64, history=False)


def test_own_runs_correct_the_times_of_their_family_and_the_median_those_of_others(report):
    before = report.answer
    runs = [a_record(ratio) for ratio in (1.2, 1.1, 3.0)] + [a_record(1.5, family="ddp")] * 3
    after = corrected(before, MachineHistory(records=tuple(runs)))
    zero3, tp = (after.families[name].time for name in ("zero3", "tp"))
    assert zero3.seconds == pytest.approx(1.2 * before.families["zero3"].time.seconds)
    assert zero3.samples_per_second == pytest.approx(before.families["zero3"].time.samples_per_second / 1.2)
    assert sum(zero3.parts.values()) == pytest.approx(zero3.seconds)
    assert tp.seconds == pytest.approx(1.5 * before.families["tp"].time.seconds)
    assert "3 own runs" in zero3.basis["step"]
    assert after.best.plan == before.best.plan
    assert [each.time.seconds for each in after.candidates] == sorted(each.time.seconds for each in after.candidates)


def test_gains_and_hints_compare_predictions_with_predictions(report):
    history = MachineHistory(records=(a_record(1.6),) * 3)
    answer = corrected(report.answer, history)
    assert answer.best.time.seconds == pytest.approx(1.6 * report.answer.best.time.seconds)
    assert compile_gain(answer) == compile_gain(report.answer)
    assert hints(answer) == hints(report.answer)


def test_a_hint_beside_corrected_times_reports_that_its_own_are_not():
    answer = plan("gpt2", cluster="8xH100", batch_size=7, history=False).answer
    runs = (a_record(1.6, family=answer.best.family),) * 3
    plain, marked = hints(answer), hints(corrected(answer, MachineHistory(records=runs)))
    assert plain
    assert [each.text for each in marked] == [
        f"{each.text} (times without the correction by own runs)" for each in plain
    ]


def test_corrections_are_bounded_and_need_several_runs_of_the_same_kind(report):
    ratios = [1.0, 50.0, 60.0, 70.0]
    assert median_ratio(ratios, (0.5, 2.0)).value == 2.0
    assert median_ratio(ratios[: LEAST_RUNS - 1], (0.5, 2.0)) is None
    compiled = MachineHistory(records=(a_record(compile="blocks"),) * 5)
    after = corrected(report.answer, compiled).best.time
    assert after.seconds == report.answer.best.time.seconds
    assert after.basis["step"] == "not corrected, since own runs are compiled"
    assert corrected(report.answer, MachineHistory()) is report.answer


def stored(tmp_path, monkeypatch, *records):
    monkeypatch.setattr("shardwise.planner.history.cache_directory", lambda: tmp_path)
    for record in records:
        append_record(record)


@pytest.mark.parametrize(("kind", "factor"), [("none", 1.0), ("blocks", 1.3), ("model", 1.3)])
@pytest.mark.parametrize("options", [{"compile": "blocks"}, {"plan": "ddp", "compile": "blocks"}])
def test_the_plans_of_a_report_are_corrected_by_runs_of_one_kind(tmp_path, monkeypatch, kind, factor, options):
    gpt2 = {"cluster": "8xH100", "batch_size": 256, **options}
    plain = plan("gpt2", history=False, **gpt2)
    runs = [a_record(1.3, device="H100", compile=kind, family=plain.answer.best.family)] * 5
    stored(tmp_path, monkeypatch, *runs)
    report = plan("gpt2", **gpt2)
    for after, before in ((report.asked.candidate, plain.asked.candidate), (report.answer.best, plain.answer.best)):
        assert after.time.seconds == pytest.approx(factor * before.time.seconds)


def test_the_interval_of_a_corrected_time_is_the_spread_of_own_runs():
    measured = (57.0, 61.0, 69.0)
    before = plan("llama-tiny", cluster="2xcpu", batch_size=8, history=False).answer
    machine = {"device": before.question.cluster.device.name, "num_devices": 2, "compute": "fp32", "family": "ddp"}
    few = MachineHistory(records=tuple(a_record(each / 91.7, **machine) for each in measured))
    many = MachineHistory(records=few.records * 6)
    widths = []
    for history in (few, many):
        time = corrected(before, history).families["ddp"].time
        assert time.interval_from == "own_runs"
        assert all(time.low_s <= each / 91.7 * before.families["ddp"].time.seconds <= time.high_s for each in measured)
        widths.append(time.interval[1] - time.interval[0])
    assert widths[1] < widths[0] / 1.5  # three runs show their spread less surely than eighteen
    equal = corrected(before, MachineHistory(records=(a_record(0.7, **machine),) * 9)).families["ddp"].time
    assert equal.interval == (1 - KNOWN, 1 + KNOWN)
    beyond = corrected(before, MachineHistory(records=(a_record(0.2, **machine),) * 9)).families["ddp"].time
    assert beyond.low_s < 0.2 * before.families["ddp"].time.seconds < beyond.high_s


def test_memory_that_runs_needed_beyond_the_prediction_lowers_the_capacity(report):
    question = report.answer.question
    tight = with_memory_margin(question, MachineHistory(records=(a_record(),) * 3))
    assert tight.capacity == pytest.approx(question.capacity / 1.1)
    wasteful = MachineHistory(records=(a_record(measured_bytes=5e9),) * 3)
    assert with_memory_margin(question, wasteful).capacity == question.capacity


def test_the_history_of_another_machine_or_version_is_not_read(tmp_path):
    for changes in ({}, {"torch": "1.0"}, {"shardwise": "0"}, {"num_devices": 4}, {"device": "H100"}):
        append_record(a_record(**changes), tmp_path)
    assert len(read_history(MACHINE, tmp_path).records) == 1
    assert read_history(parse_cluster("8xH200"), tmp_path) == MachineHistory()


def test_damaged_lines_are_skipped_and_counted(tmp_path):
    path = append_record(a_record(), tmp_path)
    with path.open("ab") as file:
        file.write(b'{"at": 1.0, "dev')
    append_record(a_record(1.3), tmp_path)
    found = read_history(MACHINE, tmp_path)
    assert [round(each.measured_step_s, 6) for each in found.records] == [2.4, 2.6]
    assert found.num_damaged == 1
    path.write_bytes(b"\xff\xfe\x00garbage\n[1, 2]\n" + b'{"a":' * 10_000)
    assert read_history(MACHINE, tmp_path) == MachineHistory(num_damaged=3)


def test_concurrent_runs_append_whole_lines(tmp_path):
    def write():
        for _ in range(50):
            append_record(a_record(), tmp_path)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_history(MACHINE, tmp_path)
    assert (len(found.records), found.num_damaged) == (200, 0)


def test_a_long_history_keeps_its_newest_half(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.planner.history.MOST_BYTES", 4000)
    for number in range(40):
        append_record(a_record(at=float(number)), tmp_path)
    path = history_path("A100-40GB", 8, tmp_path)
    assert path.stat().st_size < 5000
    assert read_history(MACHINE, tmp_path).records[-1].at == 39.0
    assert list(tmp_path.iterdir()) == [path]


def test_plan_reads_the_history_of_the_user_and_no_history_skips_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(3):
        append_record(a_record())
    asked = {"cluster": "8xA100-40GB", "batch_size": 64}
    with_history, without = plan("llama-7b", **asked), plan("llama-7b", **asked, history=False)
    assert with_history.answer.best.time.seconds > 1.15 * without.answer.best.time.seconds
    assert "own runs" in with_history.to_text()
    assert "own runs" not in without.to_text()
    assert "own runs" not in plan("llama-7b", cluster="8xH100", batch_size=64).to_text()
    history_path("A100-40GB", 8).write_text("{")
    damaged = plan("llama-7b", **asked)
    assert damaged.answer.best == without.answer.best
    assert "1 damaged" in damaged.note()


def test_short_runs_have_no_step_time():
    assert median_step([(5, 4.0), (5, 4.0)]) is None
    assert median_step([(2, 20.0)]) is None
    assert median_step([(10, 10.0), (10, 10.0), (1, 30.0)]) == 1.0


def test_a_training_run_stores_predicted_beside_measured(tmp_path, monkeypatch):
    """Rank 0 writes the comparison to the run directory and to the history, which `plan` then reads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(comparison, "LEAST_S", 0.0)
    job = dataclasses.replace(sentences_job(), steps=30)

    def body(world):
        from shardwise.runs import share_run

        train(job, Plan.preset("zero3", 2, batch_size=8), world, run=share_run(tmp_path / "run"), show_progress=False)

    run_ranks(body, 2)
    stored = json.loads((tmp_path / "run" / "comparison.json").read_bytes())
    record = msgspec.convert(stored, RunRecord)
    assert (record.family, record.num_devices, record.compute) == ("zero3", 2, "fp32")
    assert record.predicted_step_s > 0
    assert record.measured_step_s > 0
    [path] = (tmp_path / "cache" / "shardwise" / "history").iterdir()
    assert msgspec.json.decode(path.read_bytes().strip(), type=RunRecord) == record


def test_the_prediction_of_a_record_is_that_of_the_plan_in_its_own_precision(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    slow, fast = (Plan.preset("ddp", 2, batch_size=8, precision=name) for name in ("fp32", "bf16"))
    records = [record_of(sentences_job(), each, step_s=1.0, peak_bytes=10**9) for each in (slow, fast)]
    assert [record.compute for record in records] == ["fp32", "bf16"]
    assert records[0].predicted_bytes != records[1].predicted_bytes
    assert {record.device for record in records} == {parse_cluster("2xthis").device.name}
    assert records[0].measured_bytes is None  # resident memory of a CPU process is not what a plan predicts
