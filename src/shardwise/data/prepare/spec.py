"""DataPrepareSpec and DataPrepareReport: the request to tokenize documents into a corpus, and its result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from shardwise.errors import some_of
from shardwise.runs.console import counted
from shardwise.spec import PositiveInt, Report, Spec, argument, option
from shardwise.units import format_bytes_si, format_duration, format_rate

SHARD_TOKENS = 2**27
"""Tokens of a shard: 268 MB of uint16, so that a corpus of 10^12 tokens has 7,500 shards."""


class DataPrepareSpec(Spec, frozen=True, kw_only=True):
    """The request to tokenize documents into a corpus of token shards."""

    inputs: Annotated[tuple[str, ...], argument("INPUT...")]
    """Files, folders or URLs with documents: .jsonl, .jsonl.gz, .parquet, .arrow, .txt, or datasets saved to disk."""
    out: Annotated[Path, option("--out", metavar="FOLDER")]
    """Folder of the corpus; it must be empty, or contain an interrupted corpus of the same inputs and settings."""
    tokenizer: Annotated[str, option("--tokenizer", metavar="NAME")] = "bytes"
    """bytes, or the path of a tokenizer.json."""
    text_field: Annotated[str, option("--text-field", metavar="FIELD")] = "text"
    """Field or column with the text of a document."""
    end_token: Annotated[str | None, option("--end-token", metavar="TOKEN")] = None
    """Token that ends each document; by default the end-of-text token of the tokenizer."""
    vocab_size: PositiveInt | None = None
    """Vocabulary size of the model; a tokenizer with larger ids is refused."""
    processes: PositiveInt | None = None
    """Number of worker processes, by default the number of cores; the corpus does not depend on it."""
    shard_tokens: PositiveInt = SHARD_TOKENS
    """Maximum number of tokens in a shard; only a single longer document exceeds it."""

    def __post_init__(self) -> None:
        """Accept a single input without a tuple, and Paths, as a caller in Python may pass them."""
        inputs: Any = self.inputs
        if isinstance(inputs, str | Path):
            inputs = (inputs,)
        if isinstance(inputs, list | tuple):
            inputs = tuple(str(each) if isinstance(each, Path) else each for each in inputs)
        msgspec.structs.force_setattr(self, "inputs", inputs)
        super().__post_init__()


class DataPrepareReport(Report, frozen=True, kw_only=True):
    """The corpus that `data prepare` wrote."""

    path: Path
    num_shards: int
    num_kept: int
    """Shards that an interrupted run had completed."""
    num_documents: int
    num_empty: int
    """Documents without tokens, which were dropped."""
    ignored: tuple[str, ...]
    """Subfolders of the input folders, and files in them that have no supported suffix."""
    num_tokens: int
    vocab_size: int
    end_id: int
    dtype: str
    num_bytes: int
    """Size of the shards, tokens only."""
    seconds: float
    tokens_per_s: float | None
    """None if an earlier run had written the whole corpus."""

    def to_text(self) -> str:
        """Return one line per fact."""
        kept = f", {self.num_kept} of them from an interrupted run" if self.num_kept else ""
        if self.num_kept == self.num_shards:
            kept = ", all of them from an earlier run"
        lines = [
            f"corpus      {self.path}",
            f"documents   {self.num_documents:,} ({self.num_empty:,} empty ones dropped)",
            f"tokens      {self.num_tokens:,} as {self.dtype}, {format_bytes_si(self.num_bytes)}",
            f"vocabulary  {self.vocab_size:,} ids, end of document {self.end_id}",
            f"shards      {counted(self.num_shards, 'file')}{kept}",
        ]
        if self.ignored:
            entries = f"{len(self.ignored):,} subfolders or files without a supported suffix"
            lines.append(f"ignored     {entries}: {some_of(self.ignored)}")
        if self.tokens_per_s is not None:
            lines.append(f"time        {format_duration(self.seconds)}, {format_rate(self.tokens_per_s)} tokens/s")
        return "\n".join(lines)


class PrepareProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far preparing has come."""

    num_bytes: int
    """Bytes of the inputs that were read."""
    total_bytes: int
    num_tokens: int
