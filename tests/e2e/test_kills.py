"""Ranks killed at random moments train on five mixed sources as an uninterrupted run: each row once, equal losses.

A segment is one start of the training on 1 to 4 forked ranks under a random plan; it resumes from the newest checkpoint
and ends with SIGKILL to one rank or to all. Each rank writes a checksum of each row before the step that trains on it.
A later segment invalidates what earlier ones wrote from its first step on: what remains was trained on and survived.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from data.s3_server import s3_process, upload

import shardwise as sw
from jobs import FP64, sentences_job
from shardwise.checkpoint.disk import TEMPORARY
from shardwise.data.feed import Feed
from shardwise.planner.settle import LocalDevice, settle
from shardwise.runs import RunDirectory
from shardwise.testing import run_ranks
from shardwise.training.loop import train
from shardwise.training.spec import SaveSpec

BATCH, LENGTH = 12, 24
PLANS = {
    1: ("ddp",),
    2: ("ddp", "zero1", "zero3", "fsdp", "tp", "pp", "cp"),
    3: ("ddp", "zero3"),
    4: ("ddp", "fsdp", "shard2.tp2", "pp2.replicate2", "replicate2.shard2"),
}


def write_documents(path, number, seed):
    generator = random.Random(seed)
    lines = []
    for index in range(number):
        text = "".join(generator.choices("abcdefgh ", k=generator.randrange(2, 70)))
        lines.append(json.dumps({"text": f"{index} {text}"}) + "\n")
    path.write_text("".join(lines))
    return path


def prepared(folder, number, seed):
    documents = write_documents(folder.with_suffix(".jsonl"), number, seed)
    sw.data_prepare([documents], out=folder, processes=1)
    return folder


@pytest.fixture(scope="module")
def remote_corpus(tmp_path_factory):
    """The URL of the fourth source, a corpus of `data prepare` on an S3 server, and an empty cache for it."""
    folder = tmp_path_factory.mktemp("remote")
    with s3_process() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_STORAGE_CACHE", str(folder / "cache"))
        yield upload(endpoint, prepared(folder / "corpus", 60, seed=4), "corpus")


def stream_rows(numbers):
    for number in numbers:
        for index in range(20):
            yield {"text": f"row {index} of shard {number} " + "y" * (7 * index % 31)}


@pytest.fixture(scope="module")
def make_data(tmp_path_factory, remote_corpus):
    """Return the data of the job: five sources, two of them packed."""
    folder = tmp_path_factory.mktemp("sources")
    np.save(folder / "code.npy", np.random.default_rng(3).integers(0, 257, 3000).astype(np.uint16))
    stream = datasets.IterableDataset.from_generator(stream_rows, gen_kwargs={"numbers": list(range(20))})
    return sw.datasets.tokens(
        {
            "web": prepared(folder / "web", 80, seed=1),
            "notes": sw.datasets.documents(write_documents(folder / "notes.jsonl", 80, seed=2)),
            "code": folder / "code.npy",
            "remote": remote_corpus,
            "stream": sw.datasets.documents(stream),
        },
        length=LENGTH,
        proportions={
            0: {"web": 3, "notes": 2, "code": 2, "remote": 2, "stream": 3},
            8: {"web": 2, "notes": 2, "code": 1, "remote": 1, "stream": 4},
        },
        packed=["web", "notes"],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """One start of a training that resumes what earlier segments saved."""

    folder: Path
    number: int = 0
    nproc: int = 1
    plan: str = "ddp"
    num_steps: int

    @property
    def checkpoints(self):
        return self.folder / "run" / "checkpoints"

    def pid_of(self, rank):
        return self.folder / f"pid-{self.number}-{rank}"

    def rows_of(self, rank):
        return self.folder / f"rows-{self.number:03d}-{rank}.jsonl"


def train_on_rank(world, make_data, segment):
    """Train in a run directory and record the rows of each step; the body of every rank."""
    segment.pid_of(world.rank).write_text(str(os.getpid()))
    job = sentences_job(
        model=lambda: sw.models.decoder("llama-tiny", vocab_size=257, context=LENGTH),
        data=make_data,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=BATCH,
        steps=segment.num_steps,
    )
    plan = settle(segment.plan, batch_size=BATCH, world_size=world.size, device=LocalDevice())
    plan = dataclasses.replace(plan, precision=FP64)
    place = plan.layout.coordinate(world.rank)
    if (place.tp, place.pp, place.cp) == (0, 0, 0):  # others read the rows of this rank
        record_rows(segment.rows_of(world.rank))
    save = SaveSpec(every=2, keep="2", resume="auto")
    train(job, plan, world, run=RunDirectory(segment.folder / "run"), save=save, show_progress=False)


def record_rows(path):
    """Write the checksums of the rows of each step to a file when the loop receives them, in this process only."""
    plain = Feed.__iter__

    def recorded(feed):
        with path.open("a", buffering=1) as file:
            for batch in plain(feed):
                rows = []
                for micro_batch in batch.micro_batches:
                    fields = [field[: micro_batch.rows].numpy() for field in micro_batch.unsharded]
                    rows += [checksum(row) for row in zip(*fields, strict=True)]
                file.write(json.dumps({"step": batch.cursor.index // BATCH, "rows": rows}) + "\n")
                yield batch

    Feed.__iter__ = recorded


def checksum(fields):
    value = 0
    for field in fields:
        value = zlib.crc32(field.tobytes(), value)
    return value


class Killer(threading.Thread):
    """Sends SIGKILL to ranks `delay_s` after they began `num_steps` steps, or then at the next save of a checkpoint."""

    def __init__(self, segment, *, num_steps, delay_s, in_save, ranks):
        super().__init__(daemon=True)
        self._segment, self._num_steps, self._delay_s = segment, num_steps, delay_s
        self._in_save, self._ranks = in_save, ranks
        self._left = self._partial()
        self._ended = threading.Event()
        self.has_killed = self.was_saving = False

    def run(self):
        files = [self._segment.pid_of(rank) for rank in range(self._segment.nproc)]
        self._wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        self._wait_for(lambda: self._num_begun() >= self._num_steps)
        self._ended.wait(self._delay_s)
        self._wait_for(lambda: not self._in_save or self._is_saving())
        if self._ended.is_set():
            return
        self.was_saving, self.has_killed = self._is_saving(), True
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(files[rank].read_text()), signal.SIGKILL)

    def end(self):
        self._ended.set()
        self.join()

    def _wait_for(self, is_true):
        while not is_true() and not self._ended.is_set():
            time.sleep(0.0005)

    def _num_begun(self):
        path = self._segment.rows_of(0)
        return path.read_text().count("\n") if path.exists() else 0

    def _is_saving(self):
        return bool(self._partial() - self._left)

    def _partial(self):
        """Return the names of checkpoints that are being written or removed, or were when a segment was killed."""
        return {path.name for path in self._segment.checkpoints.glob(f"*{TEMPORARY}*")}


def run_killed(make_data, segment, killer):
    """Run a segment until it is killed; return False if it ended before."""
    killer.start()
    try:
        run_ranks(train_on_rank, segment.nproc, make_data, segment, timeout_s=120)
    except Exception:
        if not killer.has_killed:
            raise  # an error of its own
        return True
    finally:
        killer.end()
    return False


def survived_rows(folder):
    """Return the checksums of rows by step that survived, and the first step of each segment that began one."""
    kept, firsts = {}, []
    for segment in sorted({path.name.split("-")[1] for path in folder.glob("rows-*")}):
        lines = []
        for path in folder.glob(f"rows-{segment}-*"):
            lines += [json.loads(line) for line in path.read_text().splitlines()]
        if not lines:
            continue
        firsts.append(min(line["step"] for line in lines))
        kept = {step: rows for step, rows in kept.items() if step < firsts[-1]}
        for line in lines:
            kept.setdefault(line["step"], []).extend(line["rows"])
    return {step: Counter(rows) for step, rows in kept.items()}, firsts


def losses_of(folder):
    """Return the losses by step, each the last time it was trained."""
    found = {}
    for line in (folder / "run" / "events" / "rank0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "steps":
            found.update(enumerate(event["losses"], event["first"]))
    return found


def prepare_run(folder):
    for name in ("events", "checkpoints"):
        (folder / "run" / name).mkdir(parents=True)
    return folder


@dataclasses.dataclass
class Summary:
    """What the segments of a run were."""

    plans: Counter = dataclasses.field(default_factory=Counter)
    num_kills: int = 0
    num_saving: int = 0
    """Kills while a checkpoint was being written."""


def run_with_kills(make_data, folder, *, num_kills, num_steps, most_steps, seed):
    """Kill a training `num_kills` times, each after fewer than `most_steps` steps, then let it run to its end."""
    generator, summary = random.Random(seed), Summary()
    for number in itertools.count():
        nproc = generator.choice((1, 2, 2, 3, 4))
        plan = generator.choice(PLANS[nproc])
        segment = Segment(folder=folder, number=number, nproc=nproc, plan=plan, num_steps=num_steps)
        summary.plans[f"{nproc} {plan}"] += 1
        if summary.num_kills == num_kills:
            run_ranks(train_on_rank, nproc, make_data, segment, timeout_s=240)
            return summary
        everyone = range(nproc)
        killer = Killer(
            segment,
            num_steps=generator.randrange(most_steps),
            delay_s=generator.uniform(0, 0.05),
            in_save=generator.random() < 0.3,
            ranks=generator.choice((everyone, [generator.choice(everyone)])),
        )
        assert run_killed(make_data, segment, killer), "the training ended before all kills: it needs more steps"
        summary.num_kills += 1
        summary.num_saving += killer.was_saving
    raise AssertionError


def check_exactly_once(make_data, tmp_path, *, num_kills, num_steps, most_steps, seed):
    whole, killed = prepare_run(tmp_path / "whole"), prepare_run(tmp_path / "killed")
    run_ranks(train_on_rank, 1, make_data, Segment(folder=whole, num_steps=num_steps), timeout_s=240)
    summary = run_with_kills(
        make_data, killed, num_kills=num_kills, num_steps=num_steps, most_steps=most_steps, seed=seed
    )
    expected, _ = survived_rows(whole)
    found, firsts = survived_rows(killed)
    assert sorted(expected) == list(range(num_steps))
    assert sum(map(Counter.total, expected.values())) == num_steps * BATCH
    assert found == expected
    assert losses_of(killed) == pytest.approx(losses_of(whole), rel=1e-9)
    return summary, firsts


def test_three_kills_lose_and_repeat_no_row(make_data, tmp_path):
    summary, firsts = check_exactly_once(make_data, tmp_path, num_kills=3, num_steps=24, most_steps=8, seed=5)
    assert summary.num_kills == 3
    assert max(firsts) > 0


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_two_hundred_kills_lose_and_repeat_no_row(make_data, tmp_path):
    summary, firsts = check_exactly_once(make_data, tmp_path, num_kills=200, num_steps=700, most_steps=10, seed=0)
    print(summary, f"resumed at {len(set(firsts))} different steps: {firsts}")
    assert summary.num_kills == 200
    assert summary.num_saving >= 20
    assert len(summary.plans) == sum(map(len, PLANS.values()))
    assert len(set(firsts)) >= 50
