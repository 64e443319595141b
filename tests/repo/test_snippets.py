"""Python in the pages that is not quoted from a file runs: each block, with the names that its page assumes."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import shardwise as sw
from quotes import QUOTE
from shardwise.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Rows:
    """Rows of four numbers with two classes."""

    def __len__(self):
        return 128

    def __getitem__(self, index):
        row = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return row, (row.sum() > 0).long()


def job():
    return sw.Job(
        model=lambda: nn.Linear(4, 2),
        data=lambda _split: Rows(),
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=0.1),
        batch_size=64,
        epochs=2,
    )


def own_loop(_world):
    return {"dataset": Rows(), "model": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))}


def tensor_rules(world):
    return {"world": world, **own_loop(world)}


class StoppingRows(Rows):
    """Rows whose 65th sample requests a stop, as Ctrl-C does."""

    def __getitem__(self, index):
        if index == 64:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


def stopped_loop(world):
    plan = sw.Plan.preset("ddp", world.size)
    train = sw.dataloader(StoppingRows(), plan, world, batch_size=32, shuffle=False)
    model = sw.parallelize(nn.Linear(4, 2), plan, world)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "train": train}
    return {"world": world, "train": train, "model": model, "optimizer": optimizer, "state": state}


def steps(world):
    return {"job": job(), "plan": sw.Plan.preset("ddp", world.size, batch_size=64), "world": world}


def mixed_precision(_world):
    model = nn.Linear(4, 2)
    images, labels = next(iter(DataLoader(Rows(), batch_size=8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "images": images, "labels": labels, "loss_function": cross_entropy}


ASSUMED = {
    "examples/README.md": [mixed_precision],
    "docs/guides/own-loop.md": [own_loop, tensor_rules, stopped_loop, steps],
    "docs/guides/plan.md": [lambda _world: {}] * 2,
}
"""For every block of a page, the function that makes the names that it assumes."""
SHOWN_ONLY = {"docs/guides/checkpoints.md", "docs/reference/run-directory.md"}
"""Pages with a block that shows a form: a class, and reading the recorder of a run."""

RUN_AS_JOBS = {"docs/guides/callbacks.md", "docs/guides/hyperparameters.md"}
"""Pages whose blocks are job files, which tests/unit/runner/test_guides.py trains."""


def snippets(page):
    return BLOCK.findall(QUOTE.sub("", page.read_text()))


def test_every_page_with_python_of_its_own_is_known():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    found = {str(page.relative_to(ROOT)) for page in pages if snippets(page)}
    assert found == {*ASSUMED, *SHOWN_ONLY, *RUN_AS_JOBS}


@pytest.mark.parametrize("page", ASSUMED)
def test_a_block_of_python_runs(page, tmp_path):
    blocks = snippets(ROOT / page)
    assert len(blocks) == len(ASSUMED[page])
    for number, (block, assumed) in enumerate(zip(blocks, ASSUMED[page], strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()

        def execute(world, block=block, assumed=assumed, folder=folder):
            os.chdir(folder)
            names = {"sw": sw, "DataLoader": DataLoader, "cross_entropy": cross_entropy, **assumed(world)}
            with contextlib.suppress(SystemExit):
                exec(compile(block, page, "exec"), {"torch": torch, **names})

        run_ranks(execute, 2)
        if assumed is stopped_loop:
            assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-00000003"]
