"""A resumed IterableDataset yields the next samples at any number of ranks, or is refused."""

import dataclasses
import itertools
import random

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import shardwise as sw
from jobs import FP64, points_job, sentences_job
from refusals import refuses
from shardwise.data.feed import StreamPosition
from shardwise.data.sources.iterables import ShardedIterable
from shardwise.data.streams import StreamLoader, sample_digest
from shardwise.planner.settle import LocalDevice, settle
from shardwise.planner.trace.rehearsal import _samples
from shardwise.plans import Plan
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loop import run_loop
from shardwise.training.spec import SaveSpec


class Stream(IterableDataset):
    """Numbers from 0 to `length`; random ones differ each time the stream is read."""

    def __init__(self, length=20, *, is_random=False):
        self.length, self.is_random = length, is_random

    def __iter__(self):
        for number in range(self.length):
            yield torch.tensor(random.random() if self.is_random else float(number))


class StatefulStream(Stream):
    """A stream that seeks; it records how many samples were read."""

    def __init__(self, length=20):
        super().__init__(length)
        self.place = self.num_read = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

    def __iter__(self):
        while self.place < self.length:
            self.place, self.num_read = self.place + 1, self.num_read + 1
            yield torch.tensor(float(self.place - 1))
        self.place = 0


def rows_of(numbers):
    for number in numbers:
        for index in range(5):
            yield {"value": float(number * 5 + index)}


def hugging_face(*, shuffled=False):
    stream = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"numbers": list(range(4))})
    return stream.shuffle(seed=0, buffer_size=6) if shuffled else stream


def steps_of(dataset, *, first_step=0, num_steps=12, dp_rank=0, dp_size=1, position=None, **options):
    return StreamLoader(
        dataset,
        dp_rank=dp_rank,
        dp_size=dp_size,
        micro_batch=4 // dp_size,
        accumulation=1,
        first_step=first_step,
        num_steps=num_steps,
        seed=0,
        position=position,
        **options,
    ).steps()


def values(step):
    batch = step.batches[0]
    batch = batch["value"] if isinstance(batch, dict) else batch
    return batch[: step.rows[0]].tolist()


@pytest.mark.parametrize("make", [Stream, StatefulStream, hugging_face])
def test_stream_continues_after_its_position_over_several_epochs(make):
    whole = list(steps_of(make()))
    assert [values(step) for step in whole[4:6]] == [[16, 17, 18, 19], [0, 1, 2, 3]]
    for first in (1, 4, 5, 7, 11):
        resumed = list(steps_of(make(), first_step=first, position=whole[first - 1].position))
        assert [values(step) for step in resumed] == [values(step) for step in whole[first:]]


@pytest.mark.parametrize("make", [StatefulStream, hugging_face])
def test_state_belongs_to_the_stream_and_not_to_a_rank(make):
    whole = list(steps_of(make()))
    ranks = [list(steps_of(make(), dp_rank=rank, dp_size=2)) for rank in range(2)]
    assert [step.position for step in ranks[0]] == [step.position for step in ranks[1]]
    assert [step.position for step in ranks[0]] == [step.position for step in whole]
    halves = [steps_of(make(), dp_rank=rank, dp_size=2, first_step=3, position=whole[2].position) for rank in range(2)]
    for one, two, both in zip(*halves, whole[3:], strict=True):
        assert sorted(values(one) + values(two)) == values(both)


def test_seeking_reads_one_step_again():
    whole = list(itertools.islice(steps_of(StatefulStream(10**6)), 9))
    stream = StatefulStream(10**6)
    next(steps_of(stream, first_step=9, position=whole[8].position))
    assert stream.num_read == 8


@pytest.mark.parametrize("use_state", [True, False])
@pytest.mark.parametrize("make", [StatefulStream, hugging_face])
def test_stream_that_was_read_before_begins_at_its_first_sample_in_every_epoch(make, use_state):
    expected = [values(step) for step in steps_of(make(), num_steps=7)]
    stream = make()
    assert len(_samples(stream)) > 1  # `plan` traces the model with them
    for num_steps in (7, 3, 7):  # the second training ends within the first epoch
        steps = steps_of(stream, num_steps=num_steps, use_state=use_state)
        assert [values(step) for step in steps] == expected[:num_steps]
    interrupted = steps_of(stream, use_state=use_state)
    next(interrupted)
    interrupted.close()
    assert [values(step) for step in steps_of(stream, num_steps=7)] == expected


def test_stream_continues_at_the_state_that_its_user_has_loaded():
    stream = StatefulStream()
    stream.load_state_dict({"place": 8})
    firsts = [values(step)[0] for step in steps_of(stream, num_steps=4)]
    assert firsts == [8, 12, 16, 8]
    assert stream.state_dict() == {"place": 8}


def test_other_samples_after_a_resume_are_refused():
    for make, other in [
        (lambda: Stream(is_random=True),) * 2,
        (lambda: hugging_face(shuffled=True),) * 2,  # its state does not contain the buffer
        (StatefulStream, lambda: StatefulStream(3)),
        (Stream, lambda: Stream(9)),
    ]:
        third = list(itertools.islice(steps_of(make()), 3))[-1].position
        with refuses("data.stream-changed"):
            next(steps_of(other(), first_step=3, position=third))


def test_shuffled_stream_in_workers_is_read_from_its_start():
    """A buffer with a seed yields the same samples from the start, which is what workers do."""
    whole = list(steps_of(hugging_face(shuffled=True), num_workers=1, num_steps=4))
    position = whole[1].position
    assert position.state == ""
    resumed = list(steps_of(hugging_face(shuffled=True), first_step=2, position=position, num_steps=4))
    assert [values(step) for step in resumed] == [values(step) for step in whole[2:]]


def test_state_that_workers_cannot_restore_and_states_that_are_not_json_are_refused():
    position = next(steps_of(StatefulStream())).position
    assert position.state == '{"place":0}'
    with refuses("data.stream-state-workers", "StatefulStream"):
        steps_of(StatefulStream(), first_step=1, position=position, num_workers=2)
    stream = StatefulStream()
    stream.state_dict = lambda: {"place": object()}
    with refuses("data.stream-state-not-json", "StatefulStream"):
        next(steps_of(stream))
    with refuses("data.no-samples"):
        next(steps_of(StatefulStream(0)))


def test_checksum_of_a_sample_depends_on_its_values():
    samples = [
        torch.zeros(3),
        torch.zeros(1, 3),
        torch.ones(3, dtype=torch.bfloat16),
        {"a": 1},
        {"a": "1"},
        (np.arange(3), 2.5),
        (np.arange(3) + 1, 2.5),
        torch.eye(2).to_sparse(),
    ]
    assert len({sample_digest(sample) for sample in samples}) == len(samples)
    assert sample_digest({"a": object()}) == sample_digest({"a": object()})


# Through the training loop: checkpoints at one number of ranks, resumed at another.


class Rows(Stream):
    def __iter__(self):
        for number in super().__iter__():
            yield torch.full((6,), float(number)), (number % 3).long()


class StatefulRows(StatefulStream):
    def __iter__(self):
        for number in super().__iter__():
            yield torch.full((6,), float(number)), (number % 3).long()


def losses_of(world, make, folder, *, every=0, resume=None):
    job = points_job(lambda: torch.nn.Linear(6, 3), make(), steps=6)
    plan = dataclasses.replace(settle("ddp", batch_size=8, world_size=world.size, device=LocalDevice()), precision=FP64)
    losses = {}
    events = EventLog(None, lambda event: losses.update(enumerate(event.get("losses", []), event.get("first", 0))))
    run_loop(job, plan, world, events, Timeline(), checkpoints=folder, save=SaveSpec(every=every, resume=resume))
    return losses


@pytest.mark.parametrize("make", [Rows, StatefulRows])
def test_training_on_a_stream_resumes_on_another_number_of_ranks(make, tmp_path):
    whole = run_ranks(losses_of, 2, make, tmp_path / "saved", every=4)[0]
    checkpoint = tmp_path / "saved" / "step-00000004"
    rest = run_ranks(losses_of, 1, make, tmp_path / "resumed", resume=str(checkpoint))[0]
    assert rest == pytest.approx({step: whole[step] for step in (4, 5)}, rel=1e-9)
    with refuses("data.stream-changed"):
        run_ranks(losses_of, 1, lambda: make(5), tmp_path / "other", resume=str(checkpoint))


# The vocabulary of a corpus and of the model.


def trained_on(source):
    job = sentences_job("llama-tiny", data=sw.datasets.tokens({"web": source}, length=8), steps=1)
    with sw.world() as world:
        step = sw.build_step(job, Plan.preset("ddp", 1, batch_size=8), world)
        return step(next(iter(step.feed)))


def test_ids_outside_the_vocabulary_of_the_model_are_refused(tmp_path):
    with refuses("data.vocabulary-too-large", "web", 51, 50):
        trained_on(ShardedIterable("web", lambda _: [range(50)], 2, vocab_size=51))
    with refuses("data.token-outside-vocabulary", "web", 60, 50):
        trained_on(ShardedIterable("web", lambda _: [range(61)], 2))
    np.save(tmp_path / "tokens.npy", np.arange(61))
    with refuses("data.token-outside-vocabulary", "web", 60, 50):
        trained_on(tmp_path / "tokens.npy")
    np.save(tmp_path / "signed.npy", np.array([1, 2, -100] * 3, np.int16))  # 65,436, of which NumPy made an int16
    with refuses("data.token-outside-vocabulary", "web", -100):
        trained_on(tmp_path / "signed.npy")
    trained_on(ShardedIterable("web", lambda _: [range(50)], 2, vocab_size=50))


def test_position_of_other_data_is_refused():
    source = ShardedIterable("web", lambda _: [[1]], 1)
    job = sentences_job(data=sw.datasets.tokens(source, length=4), steps=2)
    with sw.world() as world, refuses("data.corpus-changed"):
        position = StreamPosition(epoch=0, index=0, digest=0)
        sw.build_step(job, Plan.preset("ddp", 1, batch_size=8), world, first_step=1, position=position)
