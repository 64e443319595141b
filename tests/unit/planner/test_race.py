"""The race of `--plan auto`: candidates, their measurement in a child process, the decision and the cache."""

import dataclasses
import errno
import time
from pathlib import Path

import pytest
import torch

from jobs import sentences_job, token_job_text
from shardwise.cli.train import command
from shardwise.dist import fake_world
from shardwise.hardware.cluster import parse_cluster
from shardwise.job import load_job, refer
from shardwise.launcher.nodes.node import NodesSpec
from shardwise.measurement import race_worker
from shardwise.measurement.race_worker import Race, count_blocks, extend, truncated
from shardwise.models import resnet18
from shardwise.parallel.meta_model import structure
from shardwise.planner.search import race, race_process
from shardwise.planner.search.race import measured_plans, race_candidates, tune_plan
from shardwise.planner.search.race_process import RaceRecord, TimedPlan, run_race
from shardwise.planner.search.search import search
from shardwise.planner.search.speed import Measured, decide, explain_choice, with_speed_options
from shardwise.planner.search.subject import job_subject
from shardwise.planner.settle import LocalDevice, Tuning, settle_job_plan, with_stored_options
from shardwise.plans import Plan
from shardwise.plans.toml import plan_to_toml
from shardwise.runner.local import tuning_of
from shardwise.training.spec import TrainSpec

H100 = LocalDevice(kind="cuda", has_bf16=True, name="H100")
EAGER = Plan.preset("ddp", 1, batch_size=8)
BLOCKS = dataclasses.replace(EAGER, compile="blocks")
MODEL = dataclasses.replace(EAGER, compile="model", capture="step")


def measured(*seconds, compile_s=20.0):
    """Return EAGER, BLOCKS and MODEL with these seconds of a step."""
    plans = zip((EAGER, BLOCKS, MODEL), seconds, strict=True)
    return [Measured(plan=plan, step_s=step_s, compile_s=compile_s * (plan is not EAGER)) for plan, step_s in plans]


@pytest.mark.parametrize(
    ("seconds", "num_steps", "best"),
    [
        ((1.0, 0.8, 0.5), None, MODEL),
        ((1.0, 0.8, 0.795), None, BLOCKS),  # within 1 %, the plan with fewer options
        ((1.0, 0.991, 0.992), None, EAGER),
        ((1.0, 0.8, 0.5), 30, EAGER),  # 30 steps save 15 s of 20 s of compilation
        ((1.0, 0.8, 0.5), 100, MODEL),
    ],
)
def test_fastest_plan_wins_if_its_compilation_pays(seconds, num_steps, best):
    assert decide(measured(*seconds), num_steps).plan == best


def test_predicted_plan_wins_a_tie():
    assert decide(measured(1.0, 0.8, 0.795), None, MODEL).plan == MODEL
    assert decide(measured(1.0, 0.7, 0.795), None, MODEL).plan == BLOCKS


def test_plan_that_failed_is_not_chosen():
    found = [*measured(1.0, 0.8, 0.5)[:2], Measured(plan=MODEL, error="OutOfMemoryError: 1 GiB")]
    assert decide(found, None).plan == BLOCKS
    assert decide(found[2:], None) is None


def test_start_report_has_the_measured_gain_of_each_option():
    found = [*measured(1.0, 0.8, 0.5), Measured(plan=dataclasses.replace(MODEL, capture="none"), step_s=0.52)]
    plan = explain_choice(found[2], found, BLOCKS)
    saved = "50% of a step saved together with capture"
    assert plan.source("compile") == f"auto: model and loss in one graph, {saved} (measured), 20 s of compilation"
    assert plan.source("capture") == "auto: 4% of a step saved (measured)"
    assert explain_choice(found[0], found, MODEL).source("compile").startswith("auto: eager, since compilation")


def test_plan_whose_step_could_not_be_captured_is_chosen_without_a_graph():
    timed = [TimedPlan(number=0, step_s=1.0), TimedPlan(number=1, step_s=0.5)]
    record, question = RaceRecord(timed=tuple(timed), seconds=1.0), None  # one rank: no communication is predicted
    found = measured_plans(record, [EAGER, MODEL], question)
    best = explain_choice(decide(found, None), found, MODEL)
    assert (best.compile, best.capture) == ("model", "none")
    assert "could not be captured" in best.source("capture")
    [_, kept] = measured_plans(record, [EAGER, MODEL], question, fixed=("capture",))
    assert kept.plan is MODEL
    timed[1] = dataclasses_replace(timed[1], is_captured=True)
    [_, captured] = measured_plans(RaceRecord(timed=tuple(timed), seconds=1.0), [EAGER, MODEL], question)
    assert captured.plan is MODEL


# The candidates.


def question_of(job, cluster="1xH100"):
    found = parse_cluster(cluster)
    return job_subject(job, found).question(found)


def candidates(job, cluster="1xH100", *, fixed=(), **changes):
    question = question_of(job, cluster)
    plan = dataclasses.replace(with_speed_options(job, search(question).best.plan, question), **changes)
    return plan, race_candidates(job, plan, question, fixed=fixed)


def test_candidates_differ_in_speed_options_only():
    plan, found = candidates(sentences_job(steps=100_000))
    assert 2 < len(found) == len(set(found)) <= 5
    assert (found[0].compile, found[0].capture) == ("none", "none")
    assert found[1] == plan
    assert {(each.layout, each.zero, each.precision, each.batch_size) for each in found} == {
        (plan.layout, plan.zero, plan.precision, plan.batch_size)
    }
    assert len({(each.compile, each.fused_loss) for each in found}) > 2


def test_candidates_keep_what_the_user_has_set_and_what_the_rules_refuse():
    fixed = ("compile", "micro_batch", "recompute", "fused_loss")
    _, found = candidates(sentences_job(steps=100_000), fixed=fixed, compile="blocks")
    assert {(each.compile, each.micro_batch, each.recompute, each.fused_loss) for each in found} <= {
        ("blocks", 8, "none", False)
    }
    _, found = candidates(sentences_job(steps=100_000, masks="keyed"))
    assert {(each.compile, each.capture) for each in found} <= {("none", "none")}
    _, found = candidates(sentences_job(steps=100_000), "8xH100")
    assert {each.compile for each in found} == {"none", "blocks"}


# Measurement.


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(token_job_text(8))
    return str(path)


def test_child_process_measures_candidates_and_removes_one_that_fails(job_file):
    Path(job_file).write_text(token_job_text(1))  # one block, so that only one graph is compiled
    plans = [EAGER, dataclasses.replace(EAGER, micro_batch=3), BLOCKS]
    record = run_race(refer(job_file, {}), [plan_to_toml(plan) for plan in plans], device="cpu", budget_s=60)
    eager, failed, blocks = record.timed
    assert (eager.error, eager.blocks, eager.compile_s) == ("", (), 0.0)
    assert "PlanError" in failed.error
    assert (blocks.error, blocks.number) == ("", 2)
    assert min(eager.step_s, blocks.step_s, blocks.compile_s) > 0


def test_race_ends_at_its_time_limit(job_file):
    record = run_race(refer(job_file, {}), [plan_to_toml(EAGER)], device="cpu", budget_s=0.0, compile_limit_s=0.1)
    assert record.timed == ()
    assert record.seconds < 10


def test_process_that_cannot_start_reports_the_reason(job_file):
    reference = refer(job_file, {})
    Path(job_file).write_text("job = 1")
    [timed] = run_race(reference, [plan_to_toml(EAGER)], device="cpu", budget_s=60).timed
    assert "changed since" in timed.error


CRASH = "class Block(torch.nn.Module):"
"""Line of the job's file before which `crashing` defines a function that ends the process."""


def crashing_plans(job_file):
    """Let the process of the job die with a micro-batch of 4; return three plans, of which the second one has it."""
    text = token_job_text(1).replace("torch.relu(self.linear(x))", "torch.relu(self.linear(ends(x)))")
    ends = "def ends(x):\n    if len(x) == 4 and x.device.type != 'meta':\n        os._exit(139)\n    return x\n"
    Path(job_file).write_text(text.replace(CRASH, f"import os\n\n\n{ends}\n\n{CRASH}"))
    splits = ((8, 1), (4, 2), (2, 4))
    return [dataclasses.replace(EAGER, micro_batch=size, accumulation=number) for size, number in splits]


def test_plan_that_ends_the_process_is_reported_and_the_others_are_measured(job_file):
    plans = crashing_plans(job_file)
    record = run_race(refer(job_file, {}), [plan_to_toml(plan) for plan in plans], device="cpu", budget_s=20)
    assert [timed.number for timed in record.timed] == [0, 1, 2]
    assert [bool(timed.error) for timed in record.timed] == [False, True, False]
    assert "139" in record.timed[1].error


def test_process_is_restarted_only_a_few_times(job_file, monkeypatch):
    monkeypatch.setattr(race_process, "MOST_RESTARTS", 0)
    plans = crashing_plans(job_file)
    record = run_race(refer(job_file, {}), [plan_to_toml(plan) for plan in plans], device="cpu", budget_s=20)
    assert [timed.number for timed in record.timed] == [0, 1]


def test_device_that_fails_while_memory_is_freed_is_the_error_of_its_plan(job_file, monkeypatch):
    with fake_world(1) as here:
        found = Race(load_job(refer(job_file, {})), here, budget_s=60)
        monkeypatch.setattr(race_worker, "time_steps", lambda *_: race_worker.Steps(0.1, 0.0, is_captured=False))
        assert not found.measure(0, EAGER, share_s=0.1).error
        monkeypatch.setattr(torch.compiler, "reset", lambda: (_ for _ in ()).throw(RuntimeError("illegal access")))
        timed = found.measure(1, EAGER, share_s=0.1)
    assert (timed.error, found.has_failed) == ("RuntimeError: illegal access", True)


def test_only_compilation_that_took_place_does_not_count_to_the_time_limit(job_file, monkeypatch):
    Path(job_file).write_text(token_job_text(24))
    compile_s = iter((0.05, 0.08))

    def steps(*_):
        time.sleep(0.2)
        return race_worker.Steps(0.01, next(compile_s), is_captured=False)

    monkeypatch.setattr(race_worker, "time_steps", steps)
    with fake_world(1) as here:
        found = Race(load_job(refer(job_file, {})), here, budget_s=60)
        timed = found.measure(0, MODEL, share_s=0.1)
    assert timed.compile_s == pytest.approx(0.05 + 0.03 / 2 * 22)  # of all 24 blocks
    assert timed.compiling_s == pytest.approx(0.13)  # of 2 and of 4 of them
    assert timed.measuring_s >= 0.4 - 0.13
    assert found.left_s == pytest.approx(60 - timed.measuring_s)


@pytest.mark.parametrize("number", [0, 6, 23])
def test_time_and_memory_of_partial_recompute_are_extrapolated_by_both_kinds_of_blocks(job_file, monkeypatch, number):
    Path(job_file).write_text(token_job_text(24))

    def steps(job, plan, *_):
        num_blocks = count_names(job.model())
        recomputed = min(plan.recompute_blocks or num_blocks, num_blocks) if plan.recompute != "none" else 0
        kept = num_blocks - recomputed
        return race_worker.Steps(1.0 + 0.4 * recomputed + 0.3 * kept, 0.0, False, 1e9 + 1e8 * recomputed + 3e8 * kept)

    monkeypatch.setattr(race_worker, "time_steps", steps)
    plan = dataclasses.replace(EAGER, recompute="full", recompute_blocks=number)
    with fake_world(1) as here:
        timed = Race(load_job(refer(job_file, {})), here, budget_s=60).measure(0, plan, share_s=0.1)
    recomputed = number or 24
    assert timed.step_s == pytest.approx(1.0 + 0.4 * recomputed + 0.3 * (24 - recomputed))
    assert timed.peak_bytes == pytest.approx(1e9 + 1e8 * recomputed + 3e8 * (24 - recomputed))


def count_names(model):
    """Return the number of blocks of the model of `token_job_text`."""
    return sum(type(module).__name__ == "Block" for module in model)


def test_plan_whose_measured_peak_does_not_fit_is_not_used():
    question = question_of(sentences_job(steps=100_000))
    capacity = question.capacity
    timed = [
        TimedPlan(number=0, step_s=1.0, peak_bytes=0.5 * capacity),
        TimedPlan(number=1, step_s=0.5, peak_bytes=0.999 * capacity, blocks=(2, 4)),
    ]
    found = measured_plans(RaceRecord(timed=tuple(timed), seconds=1.0), [EAGER, BLOCKS], question)
    assert decide(found, None).plan == EAGER
    assert found[0].error == ""
    assert found[1].error.startswith("it needs 8")
    assert "by its measured peak with 2 and 4 blocks" in found[1].error


class NeedsEveryBlock(torch.nn.Module):
    """Reads its seventh block by index."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(8))
        for index, block in enumerate(self.blocks):
            self.blocks[index] = Wrapped(block)

    def forward(self, x):
        return self.blocks[6](self.embedding(x)) @ self.embedding.weight.T


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_fake_ranks_measure_a_truncated_model_or_else_the_whole_one(job_file):
    plan = Plan.preset("zero2", 2, batch_size=8)
    with fake_world(2) as here:
        timed = Race(load_job(refer(job_file, {})), here, budget_s=60).measure(3, plan, share_s=0.1)
        assert (timed.number, timed.blocks, timed.error) == (3, (2, 4), "")
        # communication.find_unused_parameters is not used by zero2, so seven unused blocks are no error
        whole = Race(sentences_job(model=NeedsEveryBlock), here, budget_s=60).measure(0, plan, share_s=0.1)
        assert (whole.blocks, whole.error) == ((), "")
        assert whole.step_s > 0


def test_truncated_models_keep_their_first_blocks(job_file):
    job = load_job(refer(job_file, {}))
    assert count_blocks(job.model()) == 8
    assert [type(module).__name__ for module in truncated(job, 2).model()] == ["Embedding", "Block", "Block", "Linear"]
    assert count_blocks(resnet18(num_classes=10)) is None
    calls = []

    def build():
        calls.append(None)
        return load_job(refer(job_file, {})).model()

    short = truncated(dataclasses.replace(job, model=build), 2)
    one, other = short.model(), short.model()
    assert len(calls) == 1  # initialized once, copied for every plan
    assert one[0].weight.equal(other[0].weight)
    assert one[0].weight is not other[0].weight
    assert structure(short.model, 0).module[0].weight.is_meta
    assert extend((0.3, 0.5), 12, 12) == pytest.approx(1.3)
    assert extend((0.5, 0.4), 12, 12) == pytest.approx(0.5)  # noise: a deeper model is not faster


# The whole choice, with the measuring process replaced.


@pytest.fixture
def races(monkeypatch):
    """Replace the child process: every candidate takes 1 s a step but the last, which takes 0.5 s."""
    calls = []

    def fake(reference, plans, *, first, **_):
        calls.append(reference)
        timed = [TimedPlan(number=number, step_s=1.0, compile_s=1.0) for number in range(len(plans))]
        timed[-1] = dataclasses_replace(timed[-1], step_s=0.5)
        return RaceRecord(timed=tuple(timed[first:]), seconds=2.0)

    monkeypatch.setattr(race, "run_race", fake)
    monkeypatch.setattr(race, "LEAST_JOB_S", 0.0)
    return calls


def dataclasses_replace(struct, **changes):
    return type(struct)(**{**{name: getattr(struct, name) for name in struct.__struct_fields__}, **changes})


def test_measurements_are_cached_and_decide(job_file, races, tmp_path):
    reference, notes = refer(job_file, {}), []
    job = load_job(reference)
    tuning = Tuning(reference=reference, note=notes.append, device="cpu", folder=tmp_path / "cache")
    dry = dataclasses.replace(tuning, may_measure=False)
    assert tune_plan(job, EAGER, dry, fixed=()) is EAGER
    tuned = tune_plan(job, EAGER, tuning, fixed=())
    assert tuned != EAGER
    assert "50% of a step saved (measured)" in " ".join(tuned.sources.values())
    assert len(notes) == 2
    assert tune_plan(job, EAGER, dry, fixed=()) == tuned
    assert tune_plan(job, EAGER, tuning, fixed=()) == tuned
    assert len(races) == 1
    [file] = (tmp_path / "cache").iterdir()
    for number, damaged in enumerate((b"{", b'{"timed": [{"number": 0, "error": "\xff"}], "seconds": 1.0}'), 2):
        file.write_bytes(damaged)
        tune_plan(job, EAGER, tuning, fixed=())
        assert len(races) == number


def test_measurements_that_cannot_be_written_decide_and_leave_nothing_behind(job_file, races, tmp_path, monkeypatch):
    def full(_self, _target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    monkeypatch.setattr(Path, "replace", full)
    reference = refer(job_file, {})
    tuning = Tuning(reference=reference, note=lambda _: None, device="cpu", folder=tmp_path / "cache")
    assert tune_plan(load_job(reference), EAGER, tuning, fixed=()) != EAGER
    assert list((tmp_path / "cache").iterdir()) == []


def test_measurements_depend_on_the_driver_and_on_transformers(job_file, races, tmp_path, monkeypatch):
    reference = refer(job_file, {})
    job = load_job(reference)
    tuning = Tuning(reference=reference, note=lambda _: None, device="cpu", folder=tmp_path / "cache")
    versions = {"transformers": "5.0", "driver": "570.1"}
    known = race.package_version
    monkeypatch.setattr(race, "package_version", lambda name: versions.get(name) or known(name))
    monkeypatch.setattr(race, "driver_version", lambda: versions["driver"])
    tune_plan(job, EAGER, tuning, fixed=())
    versions["transformers"] = "5.1"  # the model is not of transformers
    tune_plan(job, EAGER, tuning, fixed=())
    assert len(races) == 1
    versions["driver"] = "580.2"
    tune_plan(job, EAGER, tuning, fixed=())
    assert len(races) == 2
    monkeypatch.setattr(race, "_uses_transformers", lambda _: True)
    for version in ("5.1", "5.2"):
        versions["transformers"] = version
        tune_plan(job, EAGER, tuning, fixed=())
    assert len(races) == 4


def test_measurements_of_a_gpu_that_others_use_are_not_kept(job_file, races, tmp_path, monkeypatch):
    reference, notes = refer(job_file, {}), []
    tuning = Tuning(reference=reference, note=notes.append, folder=tmp_path / "cache")
    for percent, number in ((60, 1), (3, 2), (60, 2)):  # the last one reads what the second one has kept
        monkeypatch.setattr(race, "gpu_utilization", lambda device, percent=percent: percent if device == 0 else 0)
        tune_plan(load_job(reference), EAGER, tuning, fixed=())
        assert len(races) == number
    assert [note for note in notes if "other processes used 60 % of cuda:0" in note] == [notes[2]]


def test_race_that_did_not_reach_all_plans_is_continued_by_the_next_run(job_file, races, tmp_path, monkeypatch):
    reference, notes, firsts = refer(job_file, {}), [], []
    job, whole = load_job(reference), race.run_race
    tuning = Tuning(reference=reference, note=notes.append, device="cpu", folder=tmp_path / "cache")

    def two_plans(*args, first, **options):
        firsts.append(first)
        record = whole(*args, first=first, **options)
        return dataclasses_replace(record, timed=record.timed[:2])

    monkeypatch.setattr(race, "run_race", two_plans)
    assert tune_plan(job, EAGER, tuning, fixed=()) == EAGER
    assert "measured 2 of" in notes[-1]
    tuned = [tune_plan(job, EAGER, tuning, fixed=()) for _ in range(3)]
    assert firsts == [0, 2]
    assert tuned[-1] != EAGER  # the last plan is the fastest
    assert tuned[1] == tuned[2]


def test_other_job_is_measured_again_and_short_job_is_not(job_file, races, tmp_path, monkeypatch):
    for overrides in ({}, {"optimizer.lr": "0.1"}):
        reference = refer(job_file, overrides)
        tuning = Tuning(reference=reference, note=lambda _: None, device="cpu", folder=tmp_path / "cache")
        tune_plan(load_job(reference), EAGER, tuning, fixed=())
    assert len(races) == 2
    monkeypatch.setattr(race, "LEAST_JOB_S", 1e9)
    assert tune_plan(load_job(reference), EAGER, tuning, fixed=()) is EAGER


def test_options_of_the_resumed_run_are_kept_only_if_they_fit_this_device(monkeypatch, tmp_path):
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "plan.toml").write_text(plan_to_toml(EAGER))
    spec = TrainSpec.of("job.py", resume=str(tmp_path))
    question = question_of(sentences_job(steps=100_000))
    needed = question.memory_of(EAGER).total
    sizes = []

    def small(*_):
        return None, dataclasses.replace(question, max_bytes=sizes[0])

    monkeypatch.setattr("shardwise.planner.settle.job_question", small)
    sizes.append(needed + 1)
    assert settled(monkeypatch, spec) == (EAGER, [])
    sizes[0] = needed - 1
    plan, notes = settled(monkeypatch, spec)
    assert (plan, len(notes)) == (MODEL, 1)
    assert "the options of the run that is resumed do not apply, because they need" in notes[0]


def settled(monkeypatch, spec, *, device=H100, overrides=None, reference="reference", nodes=None):
    """Return the plan that `train` settles on for a job whose search finds MODEL, and the notes."""
    notes, job = [], sentences_job(steps=100_000)
    monkeypatch.setattr("shardwise.planner.settle.search_plan", lambda *_: (MODEL, ""))
    monkeypatch.setattr(race, "tune_plan", lambda *_, **__: BLOCKS)
    tuning = tuning_of(spec, reference, nodes)
    tuning = tuning and dataclasses.replace(tuning, note=notes.append)
    plan = settle_job_plan(job, "auto", world_size=1, device=device, overrides=overrides or {}, tuning=tuning)
    return plan, notes


def test_only_auto_on_a_gpu_with_tuning_measures(monkeypatch):
    spec = TrainSpec.of("job.py")
    assert settled(monkeypatch, spec) == (BLOCKS, [])
    assert settled(monkeypatch, TrainSpec.of("job.py", tune=False)) == (MODEL, [])
    assert settled(monkeypatch, spec, device=LocalDevice())[0].compile == "none"
    two = NodesSpec(least=2, most=2, host="a", port=1, node_rank=0)
    assert settled(monkeypatch, spec, nodes=two) == (BLOCKS, [])
    assert settled(monkeypatch, spec, nodes=dataclasses.replace(two, node_rank=1)) == (MODEL, [])  # node 0 decides
    without = (dataclasses.replace(two, node_rank=None), dataclasses.replace(two, join_s=60.0))
    refused = [{"nodes": nodes} for nodes in without]
    for changes in (*refused, {"reference": None}, {"spec": spec.replace(deterministic=True)}):
        plan, notes = settled(monkeypatch, **{"spec": spec, **changes})
        assert (plan, len(notes)) == (MODEL, 1)


def test_no_tune_travels_on_the_command_line():
    assert [command.make_context("train", ["job.py", *argv]).params["tune"] for argv in ([], ["--no-tune"])] == [
        True,
        False,
    ]
    assert TrainSpec.of("job.py", tune=False).to_argv() == (["--no-tune"], ["job.py"])
    assert TrainSpec.of("job.py").to_argv() == ([], ["job.py"])


def test_resumed_run_keeps_its_options_without_measuring(monkeypatch, tmp_path):
    stored = dataclasses.replace(EAGER, micro_batch=4, accumulation=2, recompute="full")
    monkeypatch.setattr("shardwise.planner.settle.job_question", lambda *_: (None, question_of(sentences_job())))
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "plan.toml").write_text(plan_to_toml(stored))
    plan, _ = settled(monkeypatch, TrainSpec.of("job.py", resume=str(tmp_path)))
    assert plan == stored
    assert "resumed" in plan.source("compile")
    plan, _ = settled(
        monkeypatch, TrainSpec.of("job.py", resume=str(tmp_path)), overrides={"compile": "blocks", "micro_batch": "8"}
    )
    assert (plan.compile, plan.micro_batch, plan.accumulation, plan.recompute) == ("blocks", 8, 1, "full")
    two = Plan.preset("ddp", 2, batch_size=8)
    assert with_stored_options(two, stored, frozenset()) is two
