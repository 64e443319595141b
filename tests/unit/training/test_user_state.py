"""State of the user's own travels with checkpoints: plain values and tensors come back as they were."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from refusals import refuses
from shardwise.checkpoint import read_manifest
from shardwise.checkpoint.convert.convert import convert, open_contents
from shardwise.checkpoint.spec import ConvertSpec
from shardwise.planner.settle import LocalDevice, settle
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loop import run_loop
from shardwise.training.spec import SaveSpec
from shardwise.training.state import join_state, split_state

STATE = {
    "seen": 3,
    "best": None,
    "names": ["a", {"deep": [1.5, True]}],
    "average": {"weight": torch.arange(6.0).view(2, 3), "count": 7, "empty": {}},
    "half": torch.tensor(0.5, dtype=torch.bfloat16),
}


def test_what_is_taken_apart_comes_together_again():
    values, tensors = split_state(STATE)
    assert list(tensors) == ["user/average/weight", "user/half"]
    assert values == {"seen": 3, "best": None, "names": STATE["names"], "average": {"count": 7, "empty": {}}}
    joined = join_state(values, tensors)
    assert joined.keys() == STATE.keys()
    assert torch.equal(joined["average"]["weight"], STATE["average"]["weight"])


@pytest.mark.parametrize(
    ("state", "refusal"),
    [
        ([1], ("job.state-not-dict", "list")),
        ({"a": {3: 1}}, ("job.state-key-invalid", "Job.state['a']", "key 3")),
        ({"a/b": 1}, ("job.state-key-invalid", "'a/b'")),
        ({"a": {"b": (1, 2)}}, ("job.state-type-unsupported", "Job.state['a']['b']", "tuple")),
        ({"a": np.float32(1)}, ("job.state-type-unsupported", "numpy.float32")),
        ({"a": [object()]}, ("job.state-type-unsupported", "Job.state['a']['0']", "object")),
        ({"a": float("inf")}, ("job.state-not-finite", "is inf")),
        ({"a": 2**64}, ("job.state-integer-too-large",)),
        ({"a": [{"b": torch.ones(1)}]}, ("job.state-tensor-in-list",)),
        ({"a": [torch.ones(1)]}, ("job.state-type-unsupported", "Job.state['a']['0']", "torch.Tensor")),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_its_place(state, refusal):
    with refuses(*refusal):
        split_state(state)


class Tally:
    """Counts samples and remembers steps."""

    def __init__(self):
        self.seen, self.steps, self.sums = 0, [], torch.zeros(2, dtype=torch.float64)

    def __call__(self, context):
        samples = context.report.samples
        self.seen += samples
        self.steps.append(context.step)
        self.sums += torch.tensor([1, samples])

    def state_dict(self):
        return {"seen": self.seen, "inner": {"steps": self.steps, "sums": self.sums}}

    def load_state_dict(self, state):
        self.seen, self.steps, self.sums = state["seen"], state["inner"]["steps"], state["inner"]["sums"]


def train(world, folder, steps, *, on_step=None, state=None):
    """Train up to `steps`, saving after the third; return what was noted."""
    job = sw.Job(
        model=lambda: torch.nn.Linear(2, 2),
        data=lambda split: [(torch.ones(2), torch.tensor(0))] * 8 if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=1e-2),
        batch_size=4,
        steps=steps,
        on_step=on_step,
        state=state,
    )
    notes = []
    events = EventLog(None, lambda event: notes.append(event.get("text", "")))
    plan = settle("ddp", batch_size=4, world_size=world.size, device=LocalDevice())
    run_loop(job, plan, world, events, Timeline(), checkpoints=folder, save=SaveSpec(every=3))
    return "; ".join(notes)


def tallied(world, folder, steps):
    tally = Tally()
    train(world, folder, steps, on_step=tally, state=tally)
    return tally.seen, tally.steps, tally.sums.tolist()


def test_it_resumes_at_its_position_on_another_number_of_ranks(tmp_path):
    run_ranks(tallied, 2, tmp_path, 3)
    manifest = read_manifest(tmp_path / "step-00000003")
    assert manifest.facts["user"] == {"seen": 12, "inner": {"steps": [1, 2, 3]}}
    assert manifest.tensors["user/inner/sums"].shape == (2,)
    assert run_ranks(tallied, 4, tmp_path, 6) == [(24, [1, 2, 3, 4, 5, 6], [6.0, 24.0])] * 4


def test_a_job_that_newly_has_one_begins_it_and_gets_a_note(tmp_path):
    run_ranks(train, 1, tmp_path, 3)

    def resumed(world):
        return train(world, tmp_path, 6, state=Tally())

    assert "Job.state keeps its initial value" in run_ranks(resumed, 1)[0]


def test_a_job_that_no_longer_has_one_resumes_and_gets_a_note(tmp_path):
    run_ranks(tallied, 1, tmp_path, 3)
    assert "ignored because the job does not define one" in run_ranks(train, 1, tmp_path, 6)[0]


class Pieces:
    """Has a tensor that is sharded over ranks."""

    def __init__(self, world, fill):
        mesh = world.mesh(sw.Layout(shard=world.size))["shard"]
        self.values = DTensor.from_local(torch.full((2, 3), float(fill)), mesh, [Shard(0)])

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def test_sharded_tensors_are_saved_in_shards_and_come_back_sharded(tmp_path):
    def body(world, steps):
        pieces = Pieces(world, fill=world.rank + 1 if steps == 3 else 0)
        train(world, tmp_path, steps, state=pieces)
        return pieces.values.to_local().tolist()

    first = run_ranks(body, 2, 3)
    assert first == [[[1.0] * 3] * 2, [[2.0] * 3] * 2]
    assert len(read_manifest(tmp_path / "step-00000003").tensors["user/values"].pieces) == 2
    assert run_ranks(body, 2, 6) == first


def test_it_travels_with_conversions(tmp_path):
    run_ranks(tallied, 1, tmp_path / "own", 3)
    convert(ConvertSpec(source=tmp_path / "own", target=tmp_path / "all.pt", to="torch"))
    contents = open_contents(tmp_path / "all.pt")
    assert contents.facts["user"]["seen"] == 12
    assert contents.read(["user/inner/sums"])["user/inner/sums"].tolist() == [3.0, 12.0]


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path):
    tally = Tally()
    tally.steps = (1, 2)
    with refuses("job.state-type-unsupported", "Job.state['inner']['steps']", "tuple"):
        run_ranks(lambda world: train(world, tmp_path, 3, state=tally), 1)


def test_an_object_without_the_two_methods_is_not_a_state():
    with refuses("job.state-without-methods", "load_state_dict"):
        sw.Job(
            model=lambda: torch.nn.Linear(2, 2),
            data=lambda split: None,
            loss=sw.losses.cross_entropy,
            optimizer=sw.adamw(lr=1e-2),
            batch_size=4,
            steps=6,
            state=3,
        )
