"""Prepare two documents as a corpus, describe it, and read its tokens."""

import json
import tempfile
from pathlib import Path

import shardwise as sw
from shardwise.data.sources.open import open_source

folder = Path(tempfile.mkdtemp())
rows = [{"text": "one document"}, {"text": "another one"}]
(folder / "documents.jsonl").write_text("\n".join(map(json.dumps, rows)))

# <prepare>
report = sw.data_prepare([folder / "documents.jsonl"], out=folder / "corpus", processes=2)
print(report.num_documents, "documents,", report.num_tokens, "tokens")

report = sw.data_inspect(folder / "corpus", verify=True)
print([sample.text for sample in report.samples])

source = open_source(folder / "corpus")
lengths = source.lengths(0)  # tokens of each document of chunk 0
print(lengths, source.read(0, 0, lengths[0]))  # the first document: int64 ids
# </prepare>
