"""Prepare documents as two corpora, describe one, read its tokens, and train a decoder on a mixture of both."""

import json
import tempfile
from pathlib import Path

import fsspec

import shardwise as sw
from shardwise.data.sources.iterables import ShardedIterable
from shardwise.data.sources.open import open_source

folder = Path(tempfile.mkdtemp())
for name, count in (("documents", 2), ("books", 40)):
    rows = [{"text": f"document {number} of {name}: " + "text " * number} for number in range(count)]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

# <prepare>
report = sw.data_prepare([folder / "documents.jsonl"], out=folder / "corpus", processes=2)
print(report.num_documents, "documents,", report.num_tokens, "tokens")

report = sw.data_inspect(folder / "corpus", verify=True)
print([sample.text for sample in report.samples])

source = open_source(folder / "corpus")
lengths = source.lengths(0)  # tokens of each document of chunk 0
print(lengths, source.read(0, 0, lengths[0]))  # the first document: int64 ids
# </prepare>

# <storage>
fsspec.filesystem("memory").put(f"{folder / 'corpus'}/", "memory://bucket/corpus/", recursive=True)
source = open_source("memory://bucket/corpus")  # as s3://bucket/corpus
print(source.identity == open_source(folder / "corpus").identity)
# </storage>

sw.data_prepare([folder / "books.jsonl"], out=folder / "books")

# <mix>
sources = [f"web={folder / 'corpus'}:1", f"books={folder / 'books'}:3"]
report = sw.data_mix(sources, length=128, batch_size=8, steps=3)
print(report.to_text())
# </mix>

# <train>
job = sw.Job(
    model=lambda: sw.models.decoder("llama-tiny", vocab_size=257, context=128),
    data=sw.datasets.tokens(
        {"web": folder / "corpus", "books": folder / "books"},
        length=128,  # tokens per row
        proportions={0: {"web": 1, "books": 3}, 100: {"books": 1}},  # rows of each source, by the first step of a stage
        packed=True,  # whole documents in each row, which do not attend to each other
    ),
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-3),
    batch_size=8,
    steps=3,  # or tokens=...: sources have epochs of their own
)
# </train>
with sw.world() as world:
    sw.train(job, sw.Plan.preset("ddp", world.size, batch_size=8), world)

# <documents>
data = sw.datasets.tokens(
    {
        "web": folder / "corpus",
        "notes": sw.datasets.documents(folder / "books.jsonl", tokenizer="bytes"),  # tokenized during training
        "rows": ShardedIterable("rows", lambda shard: [[shard, 1, 2], [3, 4]], num_shards=8, vocab_size=257),
    },
    length=128,
    proportions={"web": 2, "notes": 1, "rows": 1},  # required: the number of tokens is not known in advance
)
# </documents>
tokens, targets = next(iter(data("train")))
print(tokens.shape, targets.shape)
