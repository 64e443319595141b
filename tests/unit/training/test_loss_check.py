"""Losses that cannot be right are refused at the first step; what counts is carried exactly, row tensors by origin."""

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import shardwise as sw
from jobs import FP64, Points, train_split
from refusals import refuses
from shardwise.plans import Plan
from shardwise.testing import run_ranks
from shardwise.training.evaluate import evaluate


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Net(nn.Module):
    """Returns logits and, if asked, a table that depends on the model alone."""

    def __init__(self, table=0):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)
        self.table = nn.Linear(3, table, bias=False) if table else None

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if self.table is None else {"table": normalize(self.table.weight, dim=-1), "logits": logits}


def points(length):
    return Points(length, 6, classes=4, dtype=torch.float64)


def make_job(loss, length=8, **changes):
    fields = {
        "model": Net,
        "data": train_split(points(length)),
        "loss": loss,
        "optimizer": sw.sgd(lr=0.1),
        "batch_size": 8,
        "steps": 1,
    }
    return sw.Job(**{**fields, **changes})


def train(world, job, name="one", accumulation=1):
    """Return the global losses, the remarks and, on rank 0, the trained weights."""
    plan = sw.Plan.preset(name, world.size, batch_size=job.batch_size, accumulation=accumulation)
    remarks = []
    step = sw.build_step(job, dataclasses.replace(plan, precision=FP64), world, note=remarks.append)
    losses = [world.sum({"loss": float(step(batch).loss_share)})["loss"] for batch in step.feed]
    return losses, remarks, sw.full_state_dict(step.model)


def row_sum(output, batch):
    return cross_entropy(output, batch[1], reduction="sum")


def contrast(output, batch):
    similarity = output @ output.T
    return cross_entropy(similarity, torch.arange(len(output)), reduction="sum") + 0 * batch[0].sum()


REFUSED = {
    "zero count": (sw.Loss(sum=row_sum, count=lambda _: 0), ("loss.count-zero",)),
    "mean": (sw.Loss(sum=lambda output, batch: cross_entropy(output, batch[1])), ("loss.sum-is-mean",)),
    "vector": (
        sw.Loss(sum=lambda output, batch: cross_entropy(output, batch[1], reduction="none")),
        ("loss.sum-not-scalar", "shape [8]"),
    ),
    "count of rows": (
        sw.Loss(sum=row_sum, count=lambda batch: batch[1]),
        ("loss.count-not-number", "shape [8]"),
    ),
    "negative count": (sw.Loss(sum=row_sum, count=lambda _: -1), ("loss.count-not-number", "-1")),
    "not a number": (
        sw.Loss(sum=row_sum, count=lambda _: torch.tensor(float("nan"))),
        ("loss.count-not-number", "nan"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_cannot_be_right_is_refused(case):
    loss, refusal = REFUSED[case]
    with refuses(*refusal):
        run_ranks(train, 1, make_job(loss))


def test_a_pipeline_refuses_a_mean_and_reports_a_loss_over_the_micro_batch_on_rank_0():
    with refuses("loss.sum-is-mean"):
        run_ranks(train, 2, make_job(REFUSED["mean"][0]), "pp", 2)
    (_, remarks, _), _ = run_ranks(train, 2, make_job(sw.Loss(sum=contrast)), "pp", 2)
    assert len(remarks) == 1
    assert "depends on the rows of a micro-batch" in remarks[0]


@pytest.mark.parametrize(
    ("loss", "factors"),
    [
        (sw.Loss(sum=contrast), "and 2 instead of 2"),
        (sw.Loss(sum=lambda output, batch: cross_entropy(output, batch[1]), count=lambda _: 1), "1 and 1 instead of 2"),
        (sw.Loss(sum=row_sum, count=lambda _: 1), "2 and 1 instead of 2"),
    ],
    ids=["contrastive", "mean of one", "sum over one"],
)
def test_a_loss_over_the_whole_micro_batch_gets_a_remark(loss, factors):
    ((_, remarks, _),) = run_ranks(train, 1, make_job(loss))
    assert len(remarks) == 1
    assert factors in remarks[0]


@pytest.mark.parametrize("compiled", ["none", "model"])
def test_the_first_step_computes_a_loss_of_shardwise_once(monkeypatch, compiled):
    """To repeat rows would need more memory than the plan: the logits of one row may be gigabytes."""
    sums = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", lambda *given, **named: sums.append(1) or cross_entropy(*given, **named)
    )
    with sw.world(device="cpu") as world:
        plan = Plan(micro_batch=8, precision=FP64, compile=compiled)
        step = sw.build_step(make_job(sw.losses.cross_entropy), plan, world)
        step(next(iter(step.feed)))
    assert sums == [1]


def test_the_check_draws_no_random_number_and_moves_no_state_of_the_loss():
    class Drawing:
        def __init__(self):
            self.calls = 0

        def __call__(self, output, batch):
            self.calls += 1
            drawn = torch.rand(()) + random.random() + np.random.rand()
            return row_sum(output, batch) + 0 * drawn

    def body(world):
        loss = Drawing()
        plan = dataclasses.replace(sw.Plan.preset("one", 1, batch_size=8), precision=FP64)
        step = sw.build_step(make_job(sw.Loss(sum=loss)), plan, world)
        (batch,) = step.feed
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        step(batch)
        after = (torch.rand(()).item(), random.random(), np.random.rand())
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        torch.rand(()), random.random(), np.random.rand()
        return loss.calls, after == (torch.rand(()).item(), random.random(), np.random.rand())

    assert run_ranks(body, 1) == [(1, True)]


def test_the_check_calls_no_loss_that_keeps_state():
    def body(world):
        center, seen = nn.BatchNorm1d(4, dtype=torch.float64), []

        def recorded(output, batch):
            seen.append(len(output))
            return row_sum(output, batch)

        train(world, make_job(sw.Loss(sum=lambda output, batch: row_sum(center(output), batch))))
        train(world, make_job(sw.Loss(sum=recorded)))
        return int(center.num_batches_tracked), len(seen)

    assert run_ranks(body, 1) == [(1, 1)]


@pytest.mark.parametrize("name", ["one", "ddp"])
def test_a_weighted_mean_is_that_of_pytorch_over_the_global_batch(name):
    weights = torch.tensor([0.05, 0.1, 0.02, 0.03], dtype=torch.float64)
    job = make_job(sw.losses.weighted_cross_entropy(weights))
    torch.manual_seed(job.seed)
    model = Net().double()
    inputs, targets = (torch.stack(each) for each in zip(*(points(8)[index] for index in range(8)), strict=True))
    wanted = cross_entropy(model(inputs), targets, weight=weights)
    for losses, remarks, _ in run_ranks(train, 1 if name == "one" else 2, job, name, 2):
        assert losses == pytest.approx([wanted.item()], rel=1e-9)
        assert remarks == []


@pytest.mark.parametrize(("name", "nproc"), [("one", 1), ("ddp", 2), ("pp", 2)])
def test_a_table_as_long_as_the_micro_batch_stays_whole_in_short_steps(name, nproc):
    accumulation, rows = (2, 4) if name != "ddp" else (1, 4)

    def loss_sum(output, batch):
        return row_sum(output["logits"], batch) + len(batch[1]) * output["table"].square()[:, 0].sum()

    job = make_job(sw.Loss(sum=loss_sum), length=11, steps=2, model=lambda: Net(table=rows))
    losses = run_ranks(train, nproc, job, name, accumulation)[0][0]
    alone = run_ranks(train, 1, job, "one", 1)[0][0]  # the micro-batch is longer than the table
    assert losses == pytest.approx(alone, rel=1e-9)


def test_a_table_in_the_batch_is_neither_padded_nor_shortened():
    def collate(samples):
        inputs, targets = (torch.stack(each) for each in zip(*samples, strict=True))
        return inputs, torch.arange(4.0, dtype=torch.float64), targets

    def loss_sum(output, batch):
        return cross_entropy(output * batch[1], batch[2], reduction="sum")

    job = make_job(
        sw.Loss(sum=loss_sum), length=11, steps=2, collate=collate, forward=lambda model, batch: model(batch[0])
    )
    losses = run_ranks(train, 1, job, "one", 2)[0][0]
    assert losses == pytest.approx(run_ranks(train, 1, job, "one", 1)[0][0], rel=1e-9)


def test_evaluation_counts_samples_whatever_the_length_of_the_first_tensor():
    def collate(samples):
        inputs, targets = (torch.stack(each) for each in zip(*samples, strict=True))
        nodes = inputs.repeat_interleave(5, 0)  # five nodes for each sample
        return {"nodes": nodes, "graph": torch.arange(len(samples)).repeat_interleave(5), "target": targets}

    def forward(model, batch):
        logits = model(batch["nodes"])
        return logits.new_zeros(len(batch["target"]), 4).index_add(0, batch["graph"], logits) / 5

    loss = sw.Loss(sum=lambda output, batch: cross_entropy(output, batch["target"], reduction="sum"), by_row=False)
    job = make_job(loss, collate=collate, forward=forward, data=lambda _: points(7))

    def body(world):
        plan = dataclasses.replace(sw.Plan.preset("ddp", world.size, batch_size=8), precision=FP64)
        step = sw.build_step(job, plan, world)
        found = evaluate(step, points(7))["loss"]
        batch = collate([points(8)[index] for index in range(7)])
        wanted = loss.sum(forward(step.model.module if world.size > 1 else step.model, batch), batch) / 7
        return found, wanted.item()

    for found, wanted in run_ranks(body, 2):
        assert found == pytest.approx(wanted, rel=1e-9)


class Labelled(nn.Module):
    """Returns logits and their mean loss, as transformers' models do: a decoder's, or that of labels in place."""

    def __init__(self, shift, ignored=-100):
        super().__init__()
        self.embed, self.head, self.shift, self.ignored = nn.Embedding(7, 4), nn.Linear(4, 7), shift, ignored

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        used, targets = logits[:, : labels.shape[1] - self.shift].flatten(0, 1), labels[:, self.shift :].flatten()
        mean = cross_entropy(used, targets.long(), ignore_index=self.ignored)
        return SimpleNamespace(loss=mean, logits=logits)


def rows_of_labels(index):
    tokens = torch.arange(index, index + 6) % 7
    return {"input_ids": tokens, "labels": torch.where(torch.arange(6) < 2 + index % 4, tokens, -100)}


COUNTS = {0: sw.losses.count_labels, 1: sw.losses.count_next_labels}


@pytest.mark.parametrize("shift", COUNTS)
def test_a_count_that_is_not_that_of_the_models_own_mean_gets_a_note_that_names_the_right_one(shift):
    data = train_split([rows_of_labels(index) for index in range(8)])
    for given, count in COUNTS.items():
        job = make_job(sw.losses.returned_by_model(count), model=lambda: Labelled(shift), data=data)
        ((_, notes, _),) = run_ranks(train, 1, job)
        if given == shift:
            assert notes == []
        else:
            [note] = notes
            assert COUNTS[shift].__name__ in note
            assert f"{count(torch.utils.data.default_collate(data('train'))):g}" in note


@pytest.mark.parametrize("loss", [sw.losses.labels, sw.losses.next_token])
def test_labels_that_a_decoder_must_shift_get_a_note_under_a_loss_that_does_not(loss):
    rows = [rows_of_labels(index) for index in range(8)]
    job = make_job(loss, model=lambda: Labelled(0), data=train_split(rows))
    ((_, notes, _),) = run_ranks(train, 1, job)
    assert len(notes) == (loss is sw.losses.labels)
    assert all("sw.losses.next_token" in note for note in notes)
    for row in rows:
        row["input_ids"] = torch.where(torch.arange(6) == 1, 0, row["input_ids"])  # a masked token
    ((_, notes, _),) = run_ranks(train, 1, job)
    assert notes == []


@pytest.mark.parametrize(("ignored", "dtype"), [(-1, torch.long), (-100, torch.int32)])
def test_labels_of_another_convention_are_not_counted_again(ignored, dtype):
    rows = [rows_of_labels(index) for index in range(8)]
    for row in rows:
        row["labels"] = torch.where(row["labels"] == -100, ignored, row["labels"]).to(dtype)
    loss = sw.losses.returned_by_model(lambda batch: int((batch["labels"] != ignored).sum()))
    job = make_job(loss, model=lambda: Labelled(0, ignored), data=train_split(rows))
    ((_, notes, _),) = run_ranks(train, 1, job)
    assert notes == []
