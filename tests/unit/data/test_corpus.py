"""A corpus as one stream of rows: every token once per epoch, the same rows from any position."""

import contextlib
import dataclasses
import hashlib
import itertools
import pickle
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import shardwise as sw
from jobs import FP64, SENTENCES, sentences_job
from refusals import refuses
from shardwise.checkpoint import read_manifest
from shardwise.data.corpus import Corpus, CorpusPosition, CorpusRows, MixtureStage, SourcePosition
from shardwise.data.corpus_loader import CorpusLoader
from shardwise.data.cursor import Slices
from shardwise.data.mixture import Mixture, make_mixture
from shardwise.data.packed_batches import packed_batch
from shardwise.data.row_reads import BatchMemory
from shardwise.data.sources.iterables import ShardedIterable
from shardwise.errors import JobError
from shardwise.planner.search.question import FixedFields
from shardwise.planner.search.subject import search_plan
from shardwise.planner.settle import LocalDevice, settle
from shardwise.plans import Float8, Plan, Precision
from shardwise.plans.catalogue import decoder_config
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loading import RankLoader, make_loader
from shardwise.training.loop import run_loop
from shardwise.training.spec import SaveSpec


class ListedSource:
    """Documents of random lengths; token k of the source is `first` + k, so that tokens name themselves."""

    vocab_size = None

    def __init__(self, name, num_chunks, first=0, seed=0, longest=40):
        self.name, self.num_chunks = name, num_chunks
        generator = np.random.default_rng(seed)
        self._lengths = [generator.integers(0, longest, generator.integers(1, 12)) for _ in range(num_chunks)]
        sizes = [int(each.sum()) for each in self._lengths]
        self._firsts = first + np.cumsum([0, *sizes])
        self.num_tokens = sum(sizes)
        self.identity = f"{num_chunks} chunks of {sizes}"

    def lengths(self, chunk):
        return self._lengths[chunk]

    def tokens(self, chunk):
        return np.arange(self._firsts[chunk], self._firsts[chunk + 1])


def corpus_of(*sources, shares=None, length=16, chunks_per_group=3, packed=()):
    mixture = Mixture(shares=shares or (1,) * len(sources))
    named = {source.name: source for source in sources}
    return Corpus(
        sources=named,
        stages=(MixtureStage(mixture=mixture),),
        length=length,
        chunks_per_group=chunks_per_group,
        packed=frozenset(packed),
    )


def take(rows, corpus, number):
    """Return a request for each of the next rows of the first stage."""
    request = take_all(rows, corpus, number)
    return [request.span(index, index + 1) for index in range(number)]


def take_all(rows, corpus, number):
    """Return one request for the next rows of the first stage."""
    first = rows.position.row
    return rows.take(corpus.stages[0].mixture.sources(first, first + number))


def read_row(corpus, row):
    return [values[0].numpy() for values in corpus.read(row)]


def rows_of_epoch(corpus, rows, epoch):
    """Return the rows of one epoch of the only source."""
    found = []
    while rows.position.sources[0].epoch == epoch:
        found += take(rows, corpus, 1)
    return found


def test_every_token_but_the_first_of_a_group_is_a_target_once_per_epoch():
    source = ListedSource("web", num_chunks=10)
    corpus = corpus_of(source)
    rows, epochs = CorpusRows(corpus, seed=3), []
    for epoch in range(2):
        read = [read_row(corpus, row) for row in rows_of_epoch(corpus, rows, epoch)]
        targets = np.concatenate([target for _, target in read])
        targets = np.sort(targets[targets >= 0])
        assert len(np.unique(targets)) == len(targets)
        assert source.num_tokens - len(targets) == 4  # ten chunks in groups of three
        epochs.append([tokens.tolist() for tokens, _ in read])
    assert sorted(epochs[0]) != sorted(epochs[1])  # the order of documents differs, and with it the windows


@pytest.mark.parametrize("packed", [(), ("web",)])
def test_source_with_one_document_among_empty_chunks_has_it_in_every_epoch(packed):
    source = ListedSource("web", num_chunks=8, longest=1)
    source._lengths[5], source._firsts[6:], source.num_tokens = np.array([9]), 9, 9
    corpus = corpus_of(source, chunks_per_group=1, packed=packed)
    rows = CorpusRows(corpus, seed=0)
    read = [read_row(corpus, row)[0][:9] for row in take(rows, corpus, 40)]  # up to 14 empty groups between two rows
    assert (np.array(read) == np.arange(9)).all()


def test_target_is_the_next_token_and_padding_is_ignored():
    corpus = corpus_of(ListedSource("web", num_chunks=1, longest=9), length=64)
    tokens, targets = read_row(corpus, *take(CorpusRows(corpus, seed=0), corpus, 1))
    num_targets = int((targets >= 0).sum())
    assert (targets[: num_targets - 1] == tokens[1:num_targets]).all()
    assert (targets[num_targets:] == -100).all()


def test_rows_from_a_stored_position_are_those_of_the_uninterrupted_stream():
    sources = [ListedSource(name, 5 + index, seed=index) for index, name in enumerate(("web", "code", "books"))]
    corpus = corpus_of(*sources, shares=(5, 2, 1))
    whole = CorpusRows(corpus, seed=1)
    positions, expected = [], []
    for _ in range(120):
        positions.append(whole.position)
        expected += take(whole, corpus, 2)
    for start in (0, 1, 17, 64, 119):
        resumed = CorpusRows(corpus, seed=1, position=positions[start])
        for row, other in zip(take(resumed, corpus, 240 - 2 * start), expected[2 * start :], strict=True):
            assert row.sources == other.sources
            assert (read_row(corpus, row)[0] == read_row(corpus, other)[0]).all()
    assert [row.sources[0] for row in expected[:8]].count(0) == 5


def test_changed_corpus_and_empty_source_are_refused():
    corpus = corpus_of(ListedSource("web", 2))
    position = CorpusRows(corpus, seed=0).position
    for other in (
        corpus_of(ListedSource("web", 3)),
        corpus_of(ListedSource("web", 2), ListedSource("code", 2)),
        corpus_of(ListedSource("web", 2), length=17),
        corpus_of(ListedSource("web", 2), chunks_per_group=2),
        corpus_of(ListedSource("web", 2), packed=["web"]),
    ):
        with refuses("data.corpus-changed"):
            CorpusRows(other, seed=0, position=position)
    with refuses("data.source-empty", "blank"):
        blank = corpus_of(ListedSource("blank", 4, longest=1))
        take(CorpusRows(blank, seed=0), blank, 1)


class VirtualSource:
    """A million chunks of a thousand documents with a thousand tokens: 10^12 tokens that are never stored."""

    vocab_size = None

    name, num_chunks, identity = "virtual", 10**6, "a million chunks"

    def lengths(self, _):
        return np.full(1000, 1000)

    def tokens(self, chunk):
        return np.arange(10**6) + chunk


def test_position_deep_in_a_huge_corpus_costs_one_group(monkeypatch):
    source = VirtualSource()
    calls = []
    monkeypatch.setattr(VirtualSource, "lengths", lambda self, chunk: calls.append(chunk) or np.full(1000, 1000))
    corpus = corpus_of(source, length=2048, chunks_per_group=16)
    start = SourcePosition(epoch=1, group=31_234, row=77)
    position = CorpusPosition(row=10**9, sources=(start,), form=corpus.form)
    rows = CorpusRows(corpus, seed=0, position=position)
    tokens, _ = read_row(corpus, *take(rows, corpus, 1))
    assert len(calls) == 16
    assert tokens.shape == (2048,)
    assert rows.position.sources[0] == SourcePosition(epoch=1, group=31_234, row=78)


@pytest.mark.parametrize("length", [1, 5, 1000])
def test_windows_of_any_length_cover_the_group(length):
    corpus = corpus_of(ListedSource("web", num_chunks=2), length=length, chunks_per_group=2)
    read = [read_row(corpus, row)[1] for row in rows_of_epoch(corpus, CorpusRows(corpus, seed=0), 0)]
    targets = np.concatenate(read)
    assert len(np.unique(targets[targets >= 0])) == corpus.sources["web"].num_tokens - 1


# Training on a corpus: the same losses at any world size, with workers, and after a resume.


def corpus_job(*, packed=False, stream=False, **changes):
    sources = [ListedSource(name, 6, first=0, seed=index, longest=30) for index, name in enumerate(("web", "code"))]
    if stream:
        sources = [ShardedIterable(name, open_shard, 40) for name in ("web", "code")]
    for source in sources:
        source.tokens = partial(small_tokens, source.tokens)
    corpus = corpus_of(*sources, shares=(3, 1), length=16, packed=("web", "code") if packed else ())
    return sentences_job("llama-tiny", data=lambda split: corpus if split == "train" else None, steps=8, **changes)


def small_tokens(tokens, chunk):
    return tokens(chunk) % SENTENCES.vocab_size


def losses_of(world, plan_name, folder=None, *, every=0, resume=None, **changes):
    """Train under a plan and return the losses by step; `changes` are fields of the job."""
    job = corpus_job(**changes)
    plan = settle(plan_name, batch_size=8, world_size=world.size, device=LocalDevice())
    plan = dataclasses.replace(plan, precision=FP64)
    losses = {}
    events = EventLog(None, lambda event: losses.update(enumerate(event.get("losses", []), event.get("first", 0))))
    run_loop(job, plan, world, events, Timeline(), checkpoints=folder, save=SaveSpec(every=every, resume=resume))
    return losses


@pytest.mark.parametrize("packed", [False, True])
def test_auto_plans_a_job_whose_corpus_has_no_length(packed):
    plan, why = search_plan(corpus_job(packed=packed), FixedFields(), 2)
    assert plan is not None, why
    assert plan.layout.world_size == 2


def test_corpus_trains_alike_on_any_ranks_and_after_a_resume(tmp_path):
    whole = run_ranks(losses_of, 1, "ddp")[0]
    assert len(whole) == 8
    saved = run_ranks(losses_of, 2, "fsdp", tmp_path / "saved", every=3)[0]
    assert saved == pytest.approx(whole, rel=1e-9)
    checkpoint = tmp_path / "saved" / "step-00000003"
    assert read_manifest(checkpoint).facts["data"]["row"] == 3 * 8
    rest = run_ranks(losses_of, 4, "ddp", tmp_path / "resumed", resume=str(checkpoint), num_workers=1)[0]
    assert rest == pytest.approx({step: whole[step] for step in range(3, 8)}, rel=1e-9)


def test_a_stream_resumed_with_another_seed_is_refused_as_other_data_is(tmp_path):
    """Another seed reads other shards first, which must not look like a stream that changed."""
    run_ranks(partial(losses_of, stream=True), 1, "ddp", tmp_path, every=3)
    with refuses("checkpoint.samples-differ", "seed", 0, 1):
        run_ranks(partial(losses_of, stream=True, seed=1), 1, "ddp", tmp_path, resume=str(tmp_path / "step-00000003"))


def test_loader_starts_at_the_stored_position_without_reading_what_came_before():
    corpus = corpus_of(VirtualSource(), length=128, chunks_per_group=16)
    start = SourcePosition(epoch=0, group=1000, row=5)
    position = CorpusPosition(row=8 * 10**9, sources=(start,), form=corpus.form)
    slices = Slices(batch_size=8, accumulation=2, dp_rank=1, dp_size=2, length=10**12)
    loader = CorpusLoader(corpus, slices, seed=0, first_step=10**9, num_steps=10**9 + 2, position=position)
    first, second = loader.steps()
    assert first.cursor.index == 8 * 10**9
    assert list(first.starts) == [8 * 10**9 + 4, 8 * 10**9 + 6]
    assert [tuple(batch[0].shape) for batch in first.batches] == [(2, 128), (2, 128)]
    assert first.position.sources[0].row == 13
    assert second.position.row == 8 * (10**9 + 2)


# The bytes of rows, and the memory of batches.


# SHA-256 of ten steps of four sources on two ranks with three micro-batches each.
GOLDEN = {
    "windows": "983bac4dcce461767b8a797ced865ef57b8380fd2d9ec48ca256cb8f189841ea",
    "packed": "1ee491d30e001e60625d8889b558d492ff4d2a3363d409b9fb8123871a9f8138",
    "both": "c8ce8d165e47a58e4c5f20017f7f5c04b8a1f41d6829569647c7e1dbe97f8089",
}


@pytest.mark.parametrize("form", GOLDEN)
def test_rows_and_positions_keep_their_bytes(form):
    """A change of the rows at a position would repeat or lose tokens in runs that resume."""
    packed = {"windows": (), "packed": "abcd", "both": "ac"}[form]
    sources = []
    for index, (name, dtype) in enumerate(zip("abcd", ("uint16", "uint32", "int64", "uint16"), strict=True)):
        source = ListedSource(name, 3 + index, first=1000 * index, seed=index, longest=(9, 40, 90, 40)[index])
        source.tokens = partial(typed_tokens, source.tokens, dtype)
        sources.append(source)
    corpus = corpus_of(*sources, shares=(5, 3, 1, 2), packed=packed, chunks_per_group=2)
    digest = hashlib.sha256()
    for dp_rank in range(2):
        slices = Slices(batch_size=12, accumulation=3, dp_rank=dp_rank, dp_size=2, length=10**9)
        for step in CorpusLoader(corpus, slices, seed=9, first_step=2, num_steps=12).steps():
            for batch in step.batches:
                for values in batch:
                    assert values.is_contiguous()
                    digest.update(values.numpy().tobytes())
            # These sources have no checksum of their shards, a field that was added later.
            digest.update(msgspec.json.encode(step.position).replace(b',"digest":0', b""))
    assert digest.hexdigest() == GOLDEN[form]


def typed_tokens(tokens, dtype, chunk):
    return tokens(chunk).astype(dtype)


def test_memory_of_a_batch_is_used_again_only_after_nothing_refers_to_it():
    memory = BatchMemory()
    first, second = memory.tensors(2, 4, 8)
    view, place = second[1:, ::2], first.data_ptr()
    del first, second
    (third,) = memory.tensors(1, 4, 8)
    assert third.data_ptr() == place
    fourth, fifth = memory.tensors(2, 4, 8)
    used = {each.untyped_storage().data_ptr() for each in (third, fourth, fifth)}
    assert len(used | {view.untyped_storage().data_ptr()}) == 4
    del view, third, fourth, fifth
    (other,) = memory.tensors(1, 2, 3)
    assert other.shape == (2, 3)


# Packed rows: documents do not see each other.


def test_packed_rows_have_every_token_once_and_every_target_inside_its_document():
    source = ListedSource("web", num_chunks=10)
    corpus = corpus_of(source, packed=["web"])
    rows = rows_of_epoch(corpus, CorpusRows(corpus, seed=0), 0)
    tokens, targets = [], []
    for row in rows:
        found, positions, documents, wanted = read_row(corpus, row)
        filled = int(row.rows.pieces.lengths.sum())
        tokens += found[:filled].tolist()
        targets += wanted[wanted >= 0].tolist()
        begins = np.flatnonzero(np.diff(documents, prepend=-1))
        assert (positions[begins] == 0).all()
        assert (np.diff(positions)[np.diff(documents) == 0] == 1).all()
        assert (wanted[filled:] == -100).all()
    assert sorted(tokens) == list(range(source.num_tokens))
    starts = np.cumsum(np.concatenate(source._lengths)) - np.concatenate(source._lengths)
    assert sorted(targets) == sorted(set(range(source.num_tokens)) - set(starts.tolist()))


@pytest.mark.parametrize("decoder", ["gpt2-tiny", "llama-tiny"])
def test_packed_loss_is_the_sum_over_documents_alone_and_nothing_leaks(decoder):
    corpus = corpus_job(packed=True).data("train")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = sw.models.decoder(decoder, vocab_size=50, context=16).double()
    batch = [torch.stack(values) for values in zip(*itertools.islice(corpus, 6), strict=True)]
    tokens, positions, documents, targets = batch
    logits = model(tokens, positions, documents)
    packed = sw.losses.token_cross_entropy.sum(logits, batch)
    alone, logits_alone = 0.0, torch.empty_like(logits)
    for row, document in sorted({(index, int(each)) for index in range(6) for each in documents[index]}):
        here = documents[row] == document
        logits_alone[row, here] = model(tokens[row, here][None])[0]
        alone += sw.losses.token_cross_entropy.sum(logits_alone[row, here][None], (None, targets[row, here][None]))
    assert packed.item() == pytest.approx(alone.item(), rel=1e-12)
    torch.testing.assert_close(logits, logits_alone, rtol=1e-9, atol=1e-12)
    first = documents == 0
    changed = model(torch.where(first, (tokens + 7) % 50, tokens), positions, documents)
    assert changed[~first].equal(logits[~first])  # another document does not change a bit
    assert not changed[first].equal(logits[first])
    assert (model(tokens, positions) - logits_alone).abs().max() > 1e-3  # without a mask, attention leaks
    if decoder == "gpt2-tiny":  # rotary embeddings depend on differences of positions only
        assert (model(tokens, None, documents) - logits_alone).abs().max() > 1e-3


@pytest.mark.parametrize(("size", "plan"), [(2, "zero3"), (2, "tp"), (2, "pp"), (2, "cp"), (4, "cp2.tp2")])
def test_packed_corpus_trains_as_in_one_process(size, plan):
    whole = run_ranks(losses_of, 1, "ddp", packed=True)[0]
    assert run_ranks(losses_of, size, plan, packed=True)[0] == pytest.approx(whole, rel=1e-9)


def test_corpus_refuses_a_collate_function_and_a_changed_file(tmp_path):
    where = RankLoader(dp_rank=0, group=None, first_step=0, on_gpu=False)
    plan = Plan.preset("ddp", 1, batch_size=8)
    with refuses("data.corpus-collate"):
        make_loader(corpus_job(collate=list), plan, where)
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(4000, dtype=np.uint16) % 50)
    job = corpus_job()
    job = dataclasses.replace(job, data=sw.datasets.tokens(path, length=16))
    loader, _ = make_loader(job, plan, where)
    position = next(iter(loader.steps())).position
    np.save(path, np.arange(5000, dtype=np.uint16) % 50)
    with refuses("data.corpus-changed"):  # before anything is read
        make_loader(job, plan, dataclasses.replace(where, first_step=1, position=position))


def test_position_is_known_before_the_first_step_of_a_resumed_run():
    corpus = corpus_job().data("train")
    position = CorpusPosition(row=24, sources=(SourcePosition(row=3), SourcePosition(row=1)), form=corpus.form)
    with sw.world() as world:
        plan = Plan.preset("ddp", 1, batch_size=8)
        step = sw.build_step(corpus_job(), plan, world, first_step=3, position=position)
        assert step.feed.position == position


def test_length_of_a_training_on_a_corpus_is_steps_or_tokens():
    where = RankLoader(dp_rank=0, group=None, first_step=0, on_gpu=False)
    plan = Plan.preset("ddp", 1, batch_size=8)
    job = dataclasses.replace(corpus_job(), steps=None, tokens=1000)
    assert make_loader(job, plan, where)[1].num_steps == 8  # of 8 x 16 tokens
    with refuses("data.corpus-without-steps"):
        make_loader(dataclasses.replace(corpus_job(), steps=None, epochs=1), plan, where)


def packed_training(world, model, **changes):
    job = corpus_job(packed=True, model=model, **changes)
    plan = dataclasses.replace(Plan.preset("ddp", 1, batch_size=8), precision=FP64)
    step = sw.build_step(job, plan, world)
    return step(next(iter(step.feed))).loss_share.item()


class Leaking(sw.models.Decoder):
    """A decoder with one of the mistakes that make packed documents influence each other."""

    def __init__(self, leak, config=None):
        super().__init__(config or decoder_config("gpt2-tiny", vocab_size=50, context=16))
        self.leak = leak

    def forward(self, tokens, position_ids=None, document_ids=None):
        if self.leak == "no mask":
            document_ids = None
        if self.leak == "positions":
            position_ids = None
        if self.leak == "mask off by one":
            document_ids = document_ids.roll(1, dims=1)
        return super().forward(tokens, position_ids, document_ids)


@pytest.mark.parametrize(
    ("leak", "code"),
    [
        ("no mask", "support.packed-attention"),
        ("mask off by one", "support.packed-attention"),
        ("positions", "support.packed-positions"),
    ],
)
def test_leak_between_packed_documents_is_named_before_the_first_step(leak, code):
    with sw.world() as world, refuses(code, "Leaking"):
        packed_training(world, lambda: Leaking(leak))


def test_leak_is_named_before_the_first_step_even_if_every_row_has_one_document():
    source = ShardedIterable("long", lambda shard: np.random.default_rng(shard).integers(0, 50, (12, 32)), 2)
    plan = dataclasses.replace(Plan.preset("ddp", 1, batch_size=8), precision=FP64)
    with sw.world() as world:
        for leak, code in (
            ("", None),
            ("no mask", "support.packed-attention"),
            ("positions", "support.packed-positions"),
        ):
            job = corpus_job(model=partial(Leaking, leak))
            job = dataclasses.replace(job, data=sw.datasets.tokens(source, length=16, packed=True))
            step = sw.build_step(job, plan, world)
            with refuses(code) if code else contextlib.nullcontext():
                step(next(iter(step.feed)))


class WithDropout(sw.models.Decoder):
    """A decoder with dropout, whose masks differ between positions."""

    def __init__(self):
        super().__init__(decoder_config("gpt2-tiny", vocab_size=50, context=16))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, tokens, position_ids=None, document_ids=None):
        return self.dropout(super().forward(tokens, position_ids, document_ids))


def test_dropout_is_not_a_leak_and_stays_on():
    with sw.world() as world:
        assert packed_training(world, WithDropout) > 0
        step = sw.build_step(corpus_job(packed=True, model=WithDropout), Plan.preset("ddp", 1, batch_size=8), world)
        step(next(iter(step.feed)))
        assert step.model.dropout.training


def refused_code(world, plan_name, leak, **changes):
    """Return the code with which a plan refuses a leaking model before its first update."""
    with pytest.raises(JobError) as refused:
        losses_of(world, plan_name, packed=True, model=lambda: Leaking(leak), **changes)
    return refused.value.code


@pytest.mark.parametrize(
    ("plan", "leak", "code"),
    [
        ("zero3", "no mask", "support.packed-attention"),
        ("pp", "mask off by one", "support.packed-attention"),
        ("pp", "positions", "support.packed-positions"),
        ("cp", "no mask", "support.packed-attention"),
    ],
)
def test_all_ranks_refuse_a_leak_together(plan, leak, code):
    assert run_ranks(refused_code, 2, plan, leak) == [code, code]


def test_leak_is_named_under_float8_and_in_rows_longer_than_the_probe():
    pytest.importorskip("torchao")
    config = decoder_config("gpt2-tiny", vocab_size=50, context=2048, width=64, num_heads=2)
    plan = dataclasses.replace(
        Plan.preset("ddp", 1, batch_size=1),
        precision=Precision(compute="float8"),
        float8=Float8(modules=("blocks.0.mlp.up", "blocks.0.attn.qkv")),
    )
    tokens = torch.randint(50, (2, 2048), generator=torch.Generator().manual_seed(0))
    documents = torch.arange(2048)[None].expand(2, -1) // 700
    positions = torch.arange(2048)[None].expand(2, -1) % 700
    rows = TensorDataset(tokens, positions, documents, packed_targets(tokens, documents))
    with sw.world() as world:
        for leak, names in ((None, None), ("no mask", "support.packed-attention")):
            job = sentences_job(
                "llama-tiny",
                model=partial(Leaking, leak, config),
                data=lambda split: rows if split == "train" else None,
                batch_size=1,
                steps=1,
            )
            step = sw.build_step(job, plan, world)
            with refuses(names) if names else contextlib.nullcontext():
                step(next(iter(step.feed)))


def packed_targets(tokens, documents):
    """Return the next token of each token inside its document, and -100 at the end of documents."""
    following, ends = tokens.roll(-1, dims=1), documents.roll(-1, dims=1) != documents
    ends[:, -1] = True
    return torch.where(ends, -100, following)


def packed_rows(targets=packed_targets):
    """Return 16 packed rows as the dataset of a user: documents of 5, 4 and 7 tokens."""
    documents = torch.tensor([0] * 5 + [1] * 4 + [2] * 7).expand(16, -1)
    positions = torch.tensor([*range(5), *range(4), *range(7)]).expand(16, -1)
    tokens = torch.randint(50, (16, 16), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens, positions, documents, targets(tokens, documents))


def user_job(rows, leak=None):
    data = {"train": rows}.get
    return sentences_job("llama-tiny", model=partial(Leaking, leak), data=data, steps=2)


def test_packed_dataset_of_a_user_is_probed_like_a_corpus():
    plan = dataclasses.replace(Plan.preset("ddp", 1, batch_size=8), precision=FP64)
    with sw.world() as world:
        for job, code in (
            (user_job(packed_rows()), None),
            (user_job(packed_rows(), "no mask"), "support.packed-attention"),
            (user_job(packed_rows(lambda tokens, _: tokens.roll(-1, dims=1))), "data.packed-targets"),
        ):
            step = sw.build_step(job, plan, world)
            with refuses(code) if code else contextlib.nullcontext():
                step(next(iter(step.feed)))


def probe_gathered_float8(world):
    """Train models with and without a leak, whose float8 weights FSDP2 gathers in 8 bits."""
    plan = dataclasses.replace(
        Plan.preset("zero3", world.size, batch_size=8),
        precision=Precision(compute="float8"),
        float8=Float8(modules=("blocks.0.attn.qkv",)),
    )
    for leak, code in ((None, None), ("no mask", "support.packed-attention")):
        model = partial(Leaking, leak, decoder_config("gpt2-tiny", vocab_size=50, context=16, width=64, num_heads=2))
        step = sw.build_step(dataclasses.replace(user_job(packed_rows()), model=model), plan, world)
        with refuses(code) if code else contextlib.nullcontext():
            step(next(iter(step.feed)))


def test_leak_is_named_if_float8_weights_are_gathered_in_8_bits():
    pytest.importorskip("torchao")
    run_ranks(probe_gathered_float8, 2)


def test_other_integer_fields_are_not_packed_rows():
    ones = torch.ones(2, 6, dtype=torch.int64)
    kinds = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    assert not packed_batch([ones, ones * 0, ones, ones]).has_documents
    assert not packed_batch([ones, kinds, ones, ones]).has_documents
    assert packed_batch([ones, torch.arange(6).expand(2, -1), ones, ones]).has_documents
    assert packed_batch([ones, ones, ones]) is None
    assert packed_batch([ones, ones, ones, ones.float()]) is None


def test_target_in_another_row_is_not_one_of_the_next_document():
    documents = torch.tensor([[0, 0, 1, 1, 2, 2]])
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    inside = packed_batch([tokens, tokens, documents, torch.tensor([[2, 3, 4, 9, 6, -100]])])
    assert inside.num_crossing == 0  # of two targets at ends, one is another token
    assert inside.crossing.tolist() == [[False, True, False, False, False, False]]


FAMILIES = ("Llama", "Qwen2", "Qwen3", "GPTNeoX", "Phi3", "Olmo2")


def make_transformer(family):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {} if family == "GPTNeoX" else {"num_key_value_heads": 4}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50, max_position_embeddings=16, pad_token_id=None, head_dim=8, **sizes, **heads
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_family_trains_on_packed_rows_alike_under_every_strategy(family):
    changes = {"packed": True, "model": partial(make_transformer, family), "forward": sw.losses.packed}
    whole = run_ranks(losses_of, 1, "ddp", **changes)[0]
    for plan in ("ddp", "zero3", "tp", "pp", "cp"):
        assert run_ranks(losses_of, 2, plan, **changes)[0] == pytest.approx(whole, rel=1e-9), plan


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_family_trains_on_packed_rows_or_its_leak_is_named(family):
    model = partial(make_transformer, family)
    with sw.world() as world:
        assert packed_training(world, model, forward=sw.losses.packed) > 0
        with refuses("support.packed-attention", family, "set Job.forward=sw.losses.packed"):  # a cache has no mask
            packed_training(world, model, forward=lambda model, batch: model(batch[0], position_ids=batch[1]))


def test_transformers_family_without_a_document_mask_is_refused_by_name():
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    with sw.world() as world, refuses("support.packed-attention", "finds documents by position_ids, which Bloom"):
        packed_training(world, lambda: transformers.BloomForCausalLM(config), forward=sw.losses.packed)


# Token files as datasets of a job.


@pytest.mark.parametrize("packed", [False, True])
def test_token_files_are_the_data_of_a_job(tmp_path, packed):
    for index, name in enumerate(("web", "code", "test")):
        np.save(tmp_path / f"{name}.npy", (np.arange(400 + 100 * index) * (index + 3) % 50).astype(np.uint16))
    files = {name: sw.datasets.token_files(tmp_path / f"{name}.npy", end_id=40) for name in ("web", "code", "test")}
    paths = {name: files[name] for name in ("web", "code")}
    data = sw.datasets.tokens(paths, length=16, test=files["test"], proportions={"web": 3, "code": 1}, packed=packed)
    test = data("test")
    targets = torch.cat([test[index][-1] for index in range(len(test))])
    assert int((targets >= 0).sum()) == (539 if packed else 599)
    assert data("train").stages[0].mixture.shares == (3, 1)
    assert sw.datasets.tokens(paths, length=16)("train").stages[0].mixture.shares == (4, 5)
    with sw.world() as world:
        job = sentences_job("llama-tiny", data=data, steps=2)
        assert sw.train(job, Plan.preset("ddp", 1, batch_size=8), world).result.evaluation["loss"] > 0


def test_documents_longer_than_a_row_are_split_unless_that_is_refused(tmp_path):
    shards = ShardedIterable("web", lambda number: [[1] * 5, [2] * (9 - number), [3] * 8], 2, vocab_size=9)
    data = sw.datasets.tokens({"web": shards}, length=8, packed=True)
    tokens = torch.cat([row[0] for row in itertools.islice(data("train"), 6)])
    assert int((tokens == 2).sum()) == 9 + 8
    refusing = sw.datasets.tokens({"web": shards}, length=8, packed=True, split_documents=False)
    with refuses("data.document-too-long", "web", 9, 8, "split_documents"):
        next(iter(refusing("train")))
    with refuses("data.document-too-long", "web", 9, 8):
        sw.datasets.tokens({"web": shards}, length=8, packed=True, split_documents=False, test=shards)("test")
    fitting = sw.datasets.tokens({"web": shards}, length=9, packed=True, split_documents=False)
    next(iter(fitting("train")))
    with refuses("data.split-without-packing", "split_documents"):
        sw.datasets.tokens({"web": shards}, length=8, split_documents=False)


def test_invalid_token_datasets_are_refused(tmp_path):
    with refuses("data.window-length-invalid", 0):
        sw.datasets.tokens(tmp_path, length=0)
    for changes in (
        {"proportions": {"wbe": 1}},
        {"proportions": {0: {"wbe": 1}}},
        {"packed": ["wbe"]},
        {"packed": "wbe"},
    ):
        with refuses("data.source-unknown", "wbe", "web"):
            sw.datasets.tokens({"web": tmp_path}, length=8, **changes)
    with refuses("data.curriculum-start", 5):
        sw.datasets.tokens({"web": tmp_path}, length=8, proportions={5: {"web": 1}})
    with refuses("data.proportions-zero"):
        sw.datasets.tokens({"web": tmp_path}, length=8, proportions={"web": 0})
    for proportions in ([1], {0: 1}, {0: {"web": 1}, "web": 1}, {False: {"web": 1}}, {0: {1: 1}}):
        with refuses("data.proportions-invalid"):
            sw.datasets.tokens({"web": tmp_path}, length=8, proportions=proportions)


# Kills and changes of the number of ranks, simulated with the loaders of all ranks.


def test_two_hundred_kills_and_changes_of_ranks_lose_and_repeat_nothing():
    names = ("web", "code", "books", "papers", "forum")
    sources = [ListedSource(name, 4 + index, first=10**6 * index, seed=index) for index, name in enumerate(names)]
    corpus = dataclasses.replace(
        corpus_of(*sources, packed=("code", "forum"), chunks_per_group=2),
        stages=(
            MixtureStage(mixture=make_mixture(dict(zip(names, (5, 3, 1, 1, 2), strict=True)))),
            MixtureStage(first_step=150, mixture=make_mixture(dict(zip(names, (1, 0, 4, 2, 2), strict=True)))),
        ),
    )
    num_steps = 400
    expected = [rows_of_step(step) for step in loaders_of(corpus, 1, 1, range(num_steps))]
    generator = np.random.default_rng(0)
    kills = [0, *sorted(generator.choice(np.arange(1, num_steps), 200, replace=False).tolist()), num_steps]
    found, position = [], None
    for start, stop in itertools.pairwise(kills):
        dp_size, accumulation = [(1, 1), (1, 4), (2, 2), (4, 1), (4, 3), (12, 1)][generator.integers(6)]
        # Ranks read ahead of the kill; the checkpoint has the position after the last step that was used.
        ahead = range(start, min(num_steps, stop + 2))
        steps = list(itertools.islice(loaders_of(corpus, dp_size, accumulation, ahead, position), stop - start))
        found += map(rows_of_step, steps)
        position = msgspec.json.decode(msgspec.json.encode(steps[-1][0].position), type=CorpusPosition)
    assert len(found) == num_steps
    assert found == expected


def loaders_of(corpus, dp_size, accumulation, steps, position=None):
    """Yield the LoadedSteps of all data-parallel ranks, step by step."""
    loaders = []
    for dp_rank in range(dp_size):
        slices = Slices(batch_size=12, accumulation=accumulation, dp_rank=dp_rank, dp_size=dp_size, length=10**9)
        loaders.append(
            CorpusLoader(
                corpus, slices, seed=4, first_step=steps.start, num_steps=steps.stop, position=position
            ).steps()
        )
    return zip(*loaders, strict=True)


def rows_of_step(ranks):
    """Return the tokens of a step in the order of its rows, over all ranks."""
    return [row for rank in ranks for batch in rank.batches for row in batch[0].tolist()]


def test_rows_of_sources_that_are_not_packed_are_one_document_each():
    short = ListedSource("code", 3, first=10**6, longest=9)
    corpus = corpus_of(ListedSource("web", 3), short, packed=("code",))
    request = take_all(CorpusRows(corpus, seed=0), corpus, 6)
    tokens, positions, documents, targets = (values.numpy() for values in corpus.read(request))
    is_web = tokens[:, 0] < 10**6
    assert is_web.sum() == 3
    assert (positions[is_web] == np.arange(16)).all()
    assert not documents[is_web].any()
    assert documents[~is_web].any()
    shifted, wanted = tokens[is_web][:, 1:], targets[is_web][:, :-1]
    assert (wanted[wanted >= 0] == shifted[wanted >= 0]).all()


# Iterable data, in shards.


def open_shard(number):
    """Yield the documents of a shard: numbers that name shard, document and token."""
    for document in range(5):
        yield [1000 * number + 100 * document + token for token in range(3 + document)]


def test_shards_of_an_iterable_are_a_source_that_resumes_exactly():
    source = ShardedIterable("stream", open_shard, 7)
    corpus = corpus_of(source, packed=["stream"], length=8, chunks_per_group=2)
    whole = CorpusRows(corpus, seed=0)
    positions, expected = [], []
    for _ in range(40):
        positions.append(whole.position)
        expected.append(read_row(corpus, *take(whole, corpus, 1))[0].tolist())
    assert whole.position.sources[0].epoch > 0
    again = pickle.loads(pickle.dumps(corpus))
    resumed = CorpusRows(again, seed=0, position=positions[17])
    assert [read_row(again, row)[0].tolist() for row in take(resumed, again, 23)] == expected[17:]


def test_iterable_that_changes_is_refused():
    calls = []

    def changing(number):
        calls.append(number)
        return [[len(calls), 2, 3]]

    source = ShardedIterable("stream", changing, 40)
    for shard in range(40):
        source.lengths(shard)  # more shards than stay in memory
    with refuses("data.shard-changed", "stream", 0):
        source.tokens(0)
    with refuses("data.no-shards", 0):
        ShardedIterable("stream", changing, 0)
