"""Feeding a CUDA device: pinned batches of a corpus arrive unchanged; waiting counts only if the GPU has no work."""

import time

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.data.corpus import Corpus, MixtureStage
from shardwise.data.corpus_loader import CorpusLoader
from shardwise.data.cursor import Slices
from shardwise.data.feed import Feed
from shardwise.data.mixture import Mixture
from shardwise.data.sources.open import open_source

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def loader_of(path, *, packed, pin_memory, workers=0, num_steps=40):
    corpus = Corpus(
        sources={"tokens": open_source(path, end_id=7)},
        stages=(MixtureStage(mixture=Mixture(shares=(1,))),),
        length=256,
        packed=frozenset({"tokens"} if packed else ()),
    )
    slices = Slices(batch_size=16, accumulation=2, dp_rank=0, dp_size=1, length=10**9)
    return CorpusLoader(
        corpus, slices, seed=0, first_step=0, num_steps=num_steps, num_workers=workers, pin_memory=pin_memory
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_arrive_unchanged(tmp_path, packed, workers):
    path = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 500, 400_000).astype(np.uint16).tofile(path)
    loader = loader_of(path, packed=packed, pin_memory=True, workers=workers)
    feed = Feed(loader, sw.losses.token_cross_entropy, micro_batch=8, device=CUDA)
    found = []
    for step in feed:
        torch.cuda._sleep(2_000_000)  # copies wait behind it while the host reads further batches
        found += [values.clone() for micro in step.micro_batches for values in micro.batch]
    expected = []
    for step in loader_of(path, packed=packed, pin_memory=False).steps():
        expected += [values.clone() for batch in step.batches for values in batch]
    assert all(one.cpu().equal(two) for one, two in zip(found, expected, strict=True))
    first = next(iter(loader_of(path, packed=packed, pin_memory=True, workers=workers).steps()))
    assert all(values.is_pinned() for batch in first.batches for values in batch)


class SlowLoader:
    """Steps that take 20 ms to read."""

    def __init__(self, loader):
        self._loader = loader

    def steps(self):
        for step in self._loader.steps():
            time.sleep(0.02)
            yield step


@pytest.mark.parametrize("is_busy", [False, True])
def test_wait_counts_only_if_the_gpu_has_no_work(tmp_path, is_busy):
    path = tmp_path / "tokens.bin"
    np.arange(40_000, dtype=np.uint16).tofile(path)
    loader = SlowLoader(loader_of(path, packed=False, pin_memory=True, num_steps=12))
    feed = Feed(loader, sw.losses.token_cross_entropy, micro_batch=8, device=CUDA)
    batches = iter(feed)
    next(batches)
    before = feed.waited_s
    for _ in range(8):
        torch.cuda.synchronize()
        if is_busy:
            torch.cuda._sleep(200_000_000)  # about 0.1 s
        next(batches)
    waited = feed.waited_s - before
    assert waited < 0.02 if is_busy else waited > 8 * 0.02
