"""Python's and NumPy's generators: seeded like torch's, apart on data-parallel ranks, and restored with them."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shardwise as sw
from shardwise.job import load_job, refer
from shardwise.job.generators import host_states, set_host_states
from shardwise.testing import run_ranks


class Noisy(torch.utils.data.Dataset):
    """Augments its samples by all generators of the host."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        noise = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
        return torch.tensor([*noise, float(torch.rand(()))]), torch.tensor(index % 3), torch.tensor(index)


def model():
    dropping = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
    return nn.Sequential(nn.Sequential(dropping, nn.Linear(5, 5)), nn.Linear(5, 3))


def trained(world, name="ddp", workers=0, first_step=0):
    """Train from whatever the process starts with; return the losses, and each sample as this rank reads it."""
    random.seed(), np.random.seed()
    job = sw.Job(
        model=model,
        data=lambda split: Noisy() if split == "train" else None,
        loss=sw.Loss(sum=lambda output, batch: cross_entropy(output, batch[1], reduction="sum")),
        optimizer=sw.sgd(lr=0.1),
        forward=lambda model, batch: model(batch[0]) * (1 + random.random() + np.random.rand()),
        batch_size=8,
        steps=4,
        num_workers=workers,
        layers="0",
    )
    plan = sw.Plan.preset(name, world.size, batch_size=8, accumulation=2)
    step = sw.build_step(job, plan, world, first_step=first_step)
    losses, samples = [], {}
    for batch in step.feed:
        for micro_batch in batch.micro_batches:
            noise, _, ids = micro_batch.batch
            samples |= {(batch.cursor.epoch, i): row for i, row in zip(ids.tolist(), noise.tolist(), strict=True)}
        losses.append(world.sum({"loss": float(step(batch).loss_share)})["loss"])
    return losses, samples


def test_two_trainings_draw_the_same_in_model_and_data():
    first, second = (run_ranks(trained, 2, "ddp", 2) for _ in range(2))
    assert first == second


def test_a_sample_is_the_same_at_any_number_of_ranks_and_workers_and_after_a_resume():
    ((_, alone),) = run_ranks(trained, 1)
    assert len(alone) == 32
    assert len({tuple(noise) for noise in alone.values()}) == 32
    for nproc, workers, first_step in [(2, 0, 0), (2, 2, 0), (1, 0, 2), (1, 1, 3)]:
        read = [samples for _, samples in run_ranks(trained, nproc, "ddp", workers, first_step)]
        assert sum(map(len, read)) == 32 - 8 * first_step
        for samples in read:
            assert samples == {key: alone[key] for key in samples}


def test_pipeline_stages_that_draw_differently_read_the_same_samples():
    (_, one), (_, other) = run_ranks(trained, 2, "pp")  # only the first stage drops anything
    assert one == other


def test_states_of_the_generators_continue_where_they_were_taken():
    random.gauss(0, 1), np.random.randn()
    states = host_states()

    def drawn():
        return random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()

    wanted = drawn()
    set_host_states(states)
    assert drawn() == wanted


def test_what_a_job_file_and_its_datasets_draw_is_the_same_everywhere(tmp_path):
    file = tmp_path / "drawing.py"
    file.write_text(
        "import random\nimport numpy as np\nimport torch\nimport shardwise as sw\n"
        "order = [random.random(), np.random.rand(), float(torch.rand(()))]\n"
        "job = sw.Job(model=lambda: torch.nn.Linear(1, 1), loss=sw.losses.squared_error, optimizer=sw.sgd(lr=0.1),\n"
        "    data=lambda split: order + [random.random(), float(torch.rand(()))], batch_size=1, steps=1)\n"
    )

    def body(world):
        from shardwise.data.loaders import dataset_of

        random.seed(world.rank), np.random.seed(world.rank), torch.manual_seed(world.rank)
        before = random.getstate()
        found = dataset_of(load_job(refer(str(file), {})), "train")
        return found, random.getstate() == before

    (first, kept), (second, _) = run_ranks(body, 2)
    assert first == second
    assert kept
