"""Prepare documents as two corpora, describe one, and train a decoder on a mixture of both; then train on images."""

import json
import tarfile
import tempfile
from pathlib import Path

import fsspec
from PIL import Image

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

for split, count in (("train", 8), ("test", 2)):
    for name, color in (("blue", (0, 0, 200)), ("red", (200, 0, 0))):
        (folder / split / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (40, 30 + number), color).save(folder / split / name / f"{number}.jpg")
for number in range(2):
    with tarfile.open(folder / f"shard-{number:03d}.tar", "w") as tar:
        (folder / "0.cls").write_text(str(number))
        tar.add(folder / "train" / "red" / "0.jpg", "0.jpg")
        tar.add(folder / "0.cls", "0.cls")

# <images>
job = sw.Job(
    model=lambda: sw.models.resnet18(num_classes=2, stem="small"),
    data=sw.datasets.images(folder / "train", test=folder / "test", size=32, augment=True),
    loss=sw.losses.cross_entropy,
    optimizer=sw.adamw(lr=1e-3),
    batch_size=8,
    steps=1,
    num_workers=2,  # processes that decode images, per rank
)
# </images>
with sw.world() as world:
    sw.train(job, sw.Plan.preset("ddp", world.size, batch_size=8), world)

# <tar>
data = sw.datasets.webdataset(f"{folder}/shard-{{000..001}}.tar", fields=("jpg;png", "cls"), size=32)
image, label = data("train")[1]
# </tar>
print(image.shape, label)
