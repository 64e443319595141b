"""Callbacks and evaluation while a job trains: alike under every strategy, agreed on by all ranks, resumed exactly."""

import dataclasses
import json
import os
import signal

import pytest
import torch

import shardwise as sw
from jobs import SENTENCES, sentences_job
from refusals import refuses
from shardwise.checkpoint import read_manifest
from shardwise.runs import EventLog, RunDirectory
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loop import run_loop
from shardwise.training.saving import StoppedError
from shardwise.training.spec import SaveSpec

STRATEGIES = [(2, "ddp"), (2, "zero1"), (2, "zero3"), (2, "tp"), (2, "pp"), (2, "cp")]


def make_job(**changes):
    fields = {"data": lambda split: SENTENCES, "metrics": {"accuracy": sw.metrics.token_accuracy}, "steps": 6}
    return sentences_job("llama-tiny", **{**fields, **changes})


def train(world, plan, job, folder=None, **saving):
    """Train; return the result and the events of this rank."""
    plan = sw.Plan.preset(plan, world.size, batch_size=8, precision="fp64")
    written = []
    events = EventLog(None, written.append)
    result, step = run_loop(job, plan, world, events, Timeline(), checkpoints=folder, save=SaveSpec(**saving))
    return result, written, step


def observe(world, plan, evaluate_at_start=True):
    """Return what the callbacks of every rank see, and the whole model after step 3 on rank 0."""
    seen, models = [], []

    def on_step(context):
        seen.append((context.step, context.loss, context.lr, dict(context.metrics)))
        if context.step == 3:
            models.append(context.full_model())

    def on_evaluate(context):
        seen.append(("evaluated", context.step, dict(context.metrics)))

    job = make_job(
        on_step=on_step, on_evaluate=on_evaluate, evaluate_every=2, evaluate_at_start=evaluate_at_start, steps=5
    )
    result, events, step = train(world, plan, job)
    evaluated = [event["step"] for event in events if event["kind"] == "evaluation"]
    [model] = models
    state = None if model is None else model.state_dict()
    return seen, evaluated, state, result.loss, sw.full_state_dict(step.model)


@pytest.fixture(scope="module")
def one_process():
    return run_ranks(observe, 1, "ddp")[0]


def approximately(seen):
    """Compare nested tuples of numbers to 1e-9."""
    flat = []
    for row in seen:
        for value in row:
            flat += list(value.values()) if isinstance(value, dict) else [value]
    return [pytest.approx(value, rel=1e-9) if isinstance(value, float) else value for value in flat]


@pytest.mark.parametrize(("nproc", "plan"), STRATEGIES)
def test_callbacks_see_on_every_rank_what_one_process_sees(one_process, nproc, plan):
    wanted_seen, wanted_evaluated, wanted_model, wanted_loss, wanted_weights = one_process
    ranks = run_ranks(observe, nproc, plan)
    for seen, evaluated, _, loss, _ in ranks:
        assert approximately(seen) == approximately(wanted_seen)
        assert evaluated == wanted_evaluated == [0, 2, 4, 5]
        assert loss == pytest.approx(wanted_loss, rel=1e-9)
    first, *others = ranks
    assert all(model is None for _, _, model, _, _ in others)
    torch.testing.assert_close(first[2], wanted_model, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(first[4], wanted_weights, rtol=1e-9, atol=1e-11)


def test_gathering_a_model_and_evaluating_at_the_start_change_no_step_of_a_model_with_dropout():
    class Dropped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 50))

        def forward(self, tokens):
            return self.body(tokens)

    def weights(world, **callbacks):
        return sw.full_state_dict(train(world, "ddp", make_job(model=Dropped, **callbacks))[2].model)

    plain = run_ranks(weights, 1)[0]
    watched = run_ranks(weights, 1, on_step=lambda context: context.full_model() and None, evaluate_at_start=True)[0]
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def stop_on_rank_1(world, plan):
    job = make_job(on_step=lambda context: sw.STOP if (context.step, world.rank) == (3, world.size - 1) else None)
    result, events, _ = train(world, plan, job)
    return result, [event["text"] for event in events if event["kind"] == "note"]


@pytest.mark.parametrize(("nproc", "plan"), [(1, "ddp"), (2, "ddp"), (2, "zero3"), (2, "tp"), (2, "pp")])
def test_one_rank_that_returns_stop_ends_all_ranks_after_the_same_step(nproc, plan):
    for result, notes in run_ranks(stop_on_rank_1, nproc, plan):
        assert (result.steps, result.is_stopped) == (3, True)
        assert set(result.evaluation) == {"loss", "accuracy"}
        assert any("step 3" in note for note in notes)


def test_replicas_that_synchronize_rarely_stop_when_they_are_synchronized():
    def steps(world):
        plan = sw.Plan.preset("ddp", world.size, batch_size=8, communication={"sync_every": 2})
        job = make_job(on_step=lambda context: sw.STOP if context.step == 1 else None, data=lambda _: SENTENCES)
        return run_loop(job, plan, world, EventLog(None), Timeline())[0].steps

    assert run_ranks(steps, 2) == [2, 2]


def patient(patience=2, **changes):
    """Return a job that diverges, so that the loss of its test split gets worse."""
    stopping = sw.EarlyStopping("loss", patience=patience, min_delta=10.0)  # only the first evaluation improves
    return make_job(evaluate_every=1, on_evaluate=[lambda _: None, stopping], steps=9, **changes)


def test_early_stopping_waits_for_its_patience_and_begins_anew_in_each_training():
    def steps(world):
        job = patient()
        return [train(world, "ddp", job)[0].steps for _ in range(2)]

    assert run_ranks(steps, 2) == [[3, 3], [3, 3]]
    stopping = sw.EarlyStopping("accuracy", mode="max")
    stopping.best = 0.4329411764705882
    assert "best accuracy 0.4329," in str(stopping)


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_early_stopping_resumes_as_if_never_interrupted(tmp_path, saved):
    """Whichever step the checkpoint is of, the last one included, the resumed training stops at the same step."""

    def begin(world):
        job = dataclasses.replace(patient(), steps=9)
        result, _, _ = train(world, "fsdp", job, tmp_path, every=1, keep="all")
        return result.steps

    def resume(world):
        result, _, step = train(world, "tp", patient(), tmp_path / "again", resume=str(tmp_path / f"step-{saved:08}"))
        return result.steps, result.first_step, result.evaluation, sw.full_state_dict(step.model)

    def straight(world):
        return sw.full_state_dict(train(world, "ddp", patient())[2].model)

    assert run_ranks(begin, 2) == [3, 3]
    facts = read_manifest(tmp_path / f"step-{saved:08}").facts["callbacks"]
    assert facts["states"]["on_evaluate[1]"]["waited"] == saved - 1
    (steps, first, evaluation, weights), _ = run_ranks(resume, 2)
    assert (steps, first, set(evaluation)) == (3, saved, {"loss", "accuracy"})
    torch.testing.assert_close(weights, run_ranks(straight, 1)[0], rtol=1e-9, atol=1e-11)


class Interrupting(torch.utils.data.Dataset):
    """A test split that sends a stop signal to its own process when its first sample is read, if `is_armed`."""

    is_armed = False

    def __len__(self):
        return 9  # an odd number: two data-parallel ranks have different numbers of batches

    def __getitem__(self, index):
        if self.is_armed:
            self.is_armed = False
            os.kill(os.getpid(), signal.SIGTERM)
        return SENTENCES[index]


def evaluate_and_stop(world, plan, folder, stop_at=None):
    """Train; the last rank receives a stop signal in the evaluation after step `stop_at`."""
    split = Interrupting()
    split.is_armed = (stop_at, world.rank) == (0, world.size - 1)

    def arm(context):
        split.is_armed = (context.step, world.rank) == (stop_at, world.size - 1)

    job = make_job(
        data=lambda name: SENTENCES if name == "train" else split,
        metrics={},
        evaluate_every=2,
        evaluate_at_start=True,
        on_step=arm,
        on_evaluate=sw.EarlyStopping("loss", patience=9),
        steps=4,
    )
    try:
        result, events, step = train(world, plan, job, folder, keep="min:loss")
    except StoppedError as error:
        return error.code
    evaluated = [event for event in events if event["kind"] == "evaluation"]
    values = {event["step"]: (event["epoch"], event["values"]["loss"]) for event in evaluated}
    return result, values, sw.full_state_dict(step.model)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run_ranks(evaluate_and_stop, 1, "ddp", tmp_path_factory.mktemp("uninterrupted"))[0]


@pytest.mark.parametrize(("plan", "step"), [("ddp", 0), ("ddp", 4), ("zero3", 2), ("pp", 4)])
def test_stop_signal_of_one_rank_ends_the_evaluation_of_all_ranks_and_is_resumed(tmp_path, uninterrupted, plan, step):
    assert run_ranks(evaluate_and_stop, 2, plan, tmp_path, stop_at=step) == ["train.stopped"] * 2
    facts = read_manifest(tmp_path / f"step-{step:08}").facts
    assert (facts["metrics"], "pending_evaluation" in facts) == ({}, True)
    wanted_result, wanted_values, wanted_weights = uninterrupted
    (result, values, weights), _ = run_ranks(evaluate_and_stop, 2, plan, tmp_path)
    assert (result.first_step, result.steps) == (step, 4)
    assert result.evaluation == pytest.approx(wanted_result.evaluation, rel=1e-9)
    for number, found in values.items():
        assert found == pytest.approx(wanted_values[number], rel=1e-9)
    assert list(values) == [number for number in (0, 2, 4) if number >= step]
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-9, atol=1e-11)


def test_the_best_checkpoint_by_a_metric_is_kept(tmp_path):
    def keep(world):
        _, events, _ = train(world, "ddp", make_job(evaluate_every=1), tmp_path, keep="max:accuracy")
        return {event["step"]: event["values"]["accuracy"] for event in events if event["kind"] == "evaluation"}

    found = run_ranks(keep, 2)[0]
    kept = {manifest.step: manifest for manifest in map(read_manifest, tmp_path.glob("step-*"))}
    best = max(found, key=found.get)
    assert set(kept) == {best, 6}  # the newest one is always kept
    assert kept[best].facts["metrics"]["accuracy"] == found[best]


def test_logged_values_are_events_of_their_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def log(world):
        job = make_job(on_step=lambda context: context.log("rows", torch.tensor(2.0 * context.step)), steps=2)
        return sw.train(job, "ddp", world, show_progress=False).run

    run = RunDirectory(tmp_path / run_ranks(log, 2)[0])
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    assert [(e["step"], e["values"]) for e in events if e["kind"] == "log"] == [(1, {"rows": 2.0}), (2, {"rows": 4.0})]


class Tensors:
    def __call__(self, context):
        """Do nothing."""

    def state_dict(self):
        return {"mean": torch.ones(2)}

    def load_state_dict(self, state):
        """Never called."""


def test_what_callbacks_cannot_be_is_refused(tmp_path):
    with refuses("job.not-a-callback", "Job.on_step", "3"):
        make_job(on_step=[print, 3])
    with refuses("job.early-stopping-metric", "'acuracy'", "'accuracy'"):
        make_job(on_evaluate=sw.EarlyStopping("acuracy", mode="max"))
    with refuses("job.early-stopping-mode", 'mode="max"'):
        sw.EarlyStopping("accuracy")
    with refuses("job.early-stopping-patience", 0):
        sw.EarlyStopping(patience=0)
    with refuses("job.not-whole-number", "Job.evaluate_every", 0):
        make_job(evaluate_every=0)

    class Impatient(sw.EarlyStopping):
        def __init__(self):
            super().__init__("loss", 1)

    assert isinstance(Impatient().fresh(), Impatient)
    with refuses("data.no-test-split", "Job.on_evaluate"):
        run_ranks(lambda world: train(world, "ddp", sentences_job(on_evaluate=print))[0], 1)
    with refuses("job.state-tensor-in-list", "Job.on_step[0]", "Job(state="):
        run_ranks(lambda world: train(world, "ddp", make_job(on_step=Tensors()), tmp_path)[0], 1)


def missing_key(output, batch):
    return batch["labels"]


def try_metrics(world):
    """Return the steps that were trained with a metric that raises, and the rows that a metric with state received."""
    steps, rows = [], []

    def with_state(output, batch):
        rows.append(len(output))
        return 0

    fields = {"on_step": lambda context: steps.append(context.step), "steps": 1}
    with pytest.raises(TypeError):
        train(world, "ddp", make_job(metrics={"wrong": sw.Metric(sum=missing_key)}, **fields))
    trained = list(steps)
    train(world, "ddp", make_job(metrics={"kept": sw.Metric(sum=with_state)}, **fields))
    return trained, sum(rows)


def test_a_metric_that_raises_ends_the_training_before_its_first_step_and_one_with_state_is_not_tried():
    assert run_ranks(try_metrics, 1) == [([], len(SENTENCES))]
