"""Python's and NumPy's generators: seeded like torch's, apart on data-parallel ranks, and restored with them."""

import random

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.job import load_job, refer
from shardwise.job.generators import host_states, set_host_states
from shardwise.testing import run_ranks


class Noisy(torch.utils.data.Dataset):
    """Augments its samples by Python's and NumPy's generators."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        noise = torch.tensor([random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()])
        return noise.float() + index, torch.tensor(index % 3)


def draws(world, workers):
    """Train from whatever the process starts with; return the losses and the first row that this rank reads."""
    random.seed(), np.random.seed()
    seen = []

    def forward(model, batch):
        seen.append(batch[0][0].tolist())
        return model(batch[0]) * (1 + random.random() + np.random.rand())

    job = sw.Job(
        model=lambda: torch.nn.Linear(4, 3),
        data=lambda split: Noisy() if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=0.1),
        forward=forward,
        batch_size=8,
        steps=2,
        num_workers=workers,
    )
    step = sw.build_step(job, sw.Plan.preset("ddp", world.size, batch_size=8), world)
    return [world.sum({"loss": float(step(batch).loss_share)})["loss"] for batch in step.feed], seen[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_trainings_draw_the_same_and_data_parallel_ranks_draw_apart(workers):
    first, second = (run_ranks(draws, 2, workers) for _ in range(2))
    assert first == second
    noise = [torch.tensor(row).frac() for _, row in first]
    assert not torch.isclose(noise[0], noise[1]).any()


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
