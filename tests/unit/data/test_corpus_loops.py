"""A corpus in a custom training loop: proportions by step, each row on one rank, resumed on any number of ranks."""

import dataclasses
from itertools import chain, islice

import pytest
import torch
from data.test_corpus import ListedSource, corpus_of
from data.test_sources import make_documents, write_own
from torch.nn import functional
from torch.utils.data import DataLoader

import shardwise as sw
from refusals import refuses
from shardwise.data.corpus import MixtureStage
from shardwise.data.corpus_loader import ShardedCorpusLoader
from shardwise.data.mixture import make_mixture
from shardwise.data.sharded_loader import DataRank, ReadOptions
from shardwise.testing import run_ranks
from shardwise.training import loading

VOCABULARY = 4096


def make_corpus(shift=0):
    """Return a curriculum over two sources, of which one is packed; from update 4 on, it reads only code."""
    web, code = ListedSource("web", 5), ListedSource("code", 4, first=2000, seed=1 + shift)
    stages = (
        MixtureStage(mixture=make_mixture({"web": 1, "code": 0})),
        MixtureStage(first_step=4, mixture=make_mixture({"web": 0, "code": 1})),
        MixtureStage(first_step=7, mixture=make_mixture({"web": 1, "code": 2})),
    )
    return dataclasses.replace(corpus_of(web, code, packed=["code"], length=8), stages=stages)


def loaders(dp_size, *, corpus=None, **options):
    """Return the loaders of all data-parallel ranks."""
    given = ReadOptions(**{"batch_size": 4, "seed": 3, **options})
    ranks = [DataRank(index=index, size=dp_size, device=torch.device("cpu")) for index in range(dp_size)]
    return [ShardedCorpusLoader(corpus or make_corpus(), given, rank) for rank in ranks]


def updates(of_ranks, number):
    """Return the rows of the next updates, each as sorted lists of tokens over all ranks."""
    found, rows = [], []
    for parts in zip(*of_ranks, strict=True):
        rows += [row for fields in parts for row in fields[0].tolist()]
        if of_ranks[0].is_update:
            found.append(sorted(rows))
            rows = []
        if len(found) == number:
            return found
    raise AssertionError("a corpus has no end")


def test_proportions_change_with_the_updates_of_the_loop():
    (loader,) = loaders(1)
    batches = [(loader.step, fields[0][:, 0] >= 2000) for fields in islice(loader, 7)]
    assert [step for step, _ in batches] == list(range(1, 8))
    assert [bool(is_code.any()) for _, is_code in batches] == [False] * 4 + [True] * 3
    (loader,) = loaders(1, accumulation=2)
    batches = [(loader.step, loader.is_update, loader.scale, fields[0]) for fields in islice(loader, 10)]
    assert [each[:3] for each in batches[:4]] == [(0, False, 0.5), (1, True, 0.5), (1, False, 0.5), (2, True, 0.5)]
    assert [bool((tokens[:, 0] >= 2000).any()) for *_, tokens in batches] == [False] * 8 + [True] * 2


def test_updates_are_equal_at_any_number_of_ranks():
    (alone,) = loaders(1)
    expected = updates([alone], 9)
    assert updates(loaders(4), 9) == updates(loaders(2, num_workers=1), 9) == expected
    assert updates(loaders(2, batch_size=2, accumulation=2), 9) == expected
    assert updates(loaders(1, seed=4), 9) != expected


@pytest.mark.parametrize("accumulation", [1, 2])
def test_resumes_and_changes_of_ranks_lose_and_repeat_nothing(accumulation):
    options = {"batch_size": 8 // accumulation, "accumulation": accumulation}
    expected = updates(loaders(1, **options), 30)
    found, state = [], None
    for number, dp_size in [(3, 2), (1, 4), (5, 1), (7, 4), (2, 2), (12, 1)]:
        ranks = loaders(dp_size, **options)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        found += updates(ranks, number)
        states = [loader.state_dict() for loader in ranks]
        assert states == states[:1] * dp_size
        state = states[0]
        assert ranks[0].step == len(found)
    assert found == expected


def test_an_iteration_continues_after_the_last_update():
    expected = updates(loaders(1, accumulation=2), 4)
    (loader,) = loaders(1, accumulation=2)
    found = updates([loader], 2)
    next(iter(loader))  # the first batch of an update, which is repeated
    assert loader.state_dict()["step"] == 2
    assert found + updates([loader], 2) == expected


def test_state_of_another_corpus_or_loader_is_refused():
    (loader,) = loaders(1)
    state = updates([loader], 2) and loader.state_dict()
    for name, value in (("batch_size", 8), ("seed", 0), ("accumulation", 2)):
        with refuses("data.loader-state-mismatch", name, value):
            loaders(1, **{name: value})[0].load_state_dict(state)
    with refuses("data.corpus-changed", "sources"):
        loaders(1, corpus=make_corpus(shift=1))[0].load_state_dict(state)
    with refuses("data.corpus-changed", "dataset"):
        loaders(1)[0].load_state_dict({"epoch": 0, "index": 3})


def test_options_that_a_corpus_defines_are_refused():
    def body(world):
        plan, corpus = sw.Plan.preset("ddp", 1), make_corpus()
        with refuses("data.corpus-collate"):
            sw.dataloader(corpus, plan, world, batch_size=4, collate=list)
        with refuses("data.corpus-order", "shuffle"):
            sw.dataloader(corpus, plan, world, batch_size=4, shuffle=False)
        with refuses("data.stream-evaluation", "Corpus"):
            sw.dataloader(corpus, plan, world, batch_size=4, evaluate=True)
        loader = sw.dataloader(DataLoader(corpus, batch_size=4), plan, world, seed=3)
        assert updates([loader], 9) == updates(loaders(1), 9)
        with pytest.raises(TypeError, match="no length"):
            len(loader)

    run_ranks(body, 1)


def test_every_rank_refuses_a_small_corpus_that_changed_and_a_note_names_a_large_one(tmp_path, monkeypatch):
    write_own(tmp_path / "corpus", make_documents())
    shard = tmp_path / "corpus" / "shard-00001.bin"
    content = bytearray(shard.read_bytes())
    content[2] ^= 1
    shard.write_bytes(content)
    corpus = sw.datasets.tokens(tmp_path / "corpus", length=8)("train")

    def refused(world):
        with refuses("data.checksum-mismatch", shard):
            sw.dataloader(corpus, sw.Plan.preset("ddp", world.size), world, batch_size=4)

    def noted(world):
        notes = []
        loading.check_checksums(corpus.sources.values(), world, notes.append)
        return notes

    run_ranks(refused, 2)
    monkeypatch.setattr(loading, "VERIFIED_BYTES", 100)
    ((note,),) = run_ranks(noted, 1)
    assert f"shardwise data inspect {tmp_path / 'corpus'} --verify" in note


# A loop of one's own that is killed.


def trained(world, plan_name, folder, steps, resume=False):
    """Train until `steps` updates, save after the third, and return the rows and the mean loss of each update."""
    plan = sw.Plan.preset(plan_name, world.size, precision="fp64")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))
    model = sw.parallelize(net, plan, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train = sw.dataloader(make_corpus(), plan, world, batch_size=4, seed=3)
    state = {"model": model, "optimizer": optimizer, "train": train}
    if resume:
        assert sw.load(folder, state) == train.step == 3
    seen = []
    for tokens, *_, targets in train:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        count = train.mean((targets >= 0).sum())
        loss = loss / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((tokens.tolist(), train.mean(loss.detach())))
        if train.step == 3 and not resume:
            sw.save(folder, state, step=train.step)
        if train.step == steps:
            return seen
    return None


def joined(ranks):
    """Return the rows of each step over all ranks, and its loss."""
    return [(list(chain(*(rows for rows, _ in step))), step[0][1]) for step in zip(*ranks, strict=True)]


def test_a_killed_loop_resumes_on_another_number_of_ranks_with_equal_samples_and_losses(tmp_path):
    expected = joined(run_ranks(trained, 1, "ddp", tmp_path / "alone", 9))
    killed = joined(run_ranks(trained, 2, "ddp", tmp_path / "killed", 5))  # two updates are lost
    resumed = joined(run_ranks(trained, 4, "fsdp", tmp_path / "killed", 9, True))
    for found, wanted in zip([*killed[:3], *resumed], expected, strict=True):
        assert found[0] == wanted[0]
        assert found[1] == pytest.approx(wanted[1], rel=1e-9)
