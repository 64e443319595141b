"""Tokenizers of `shardwise data`: bytes, built in, and files of the tokenizers library (`tokenizer.json`)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardwise.data.sources.shards import TokenizerName, smallest_dtype, token_dtype
from shardwise.data.storage.files import read_file
from shardwise.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardwise.data.storage.locations import Location

BYTES = "bytes"
_BYTES_NAME = TokenizerName(name=BYTES)
_END_OF_TEXT = 256
"""The end-of-document id of the bytes tokenizer."""
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[SEP]")
"""End-of-document tokens of GPT-2, Llama 3, Gemma, Llama 2 and BERT, in the order in which they are tried."""


@dataclass(frozen=True)
class EncodedTexts:
    """Documents as tokens, one after the other, each ending with the end-of-document id."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    """Tokens of each document, the end-of-document id included."""
    num_empty: int
    """Texts without tokens, which are left out."""


class Tokenizer(Protocol):
    """A mapping from texts to token ids and back."""

    @property
    def name(self) -> TokenizerName:
        """Name and checksum, as recorded in the index of a corpus."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_id(self) -> int:
        """The id after the last token of each document."""

    @property
    def content(self) -> bytes:
        """The tokenizer file, which a corpus contains a copy of; empty for bytes."""

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the tokens of texts."""

    def decode(self, ids: NDArray[np.int64]) -> str:
        """Return the text of token ids."""


def load_tokenizer(
    name: str, path: Location | None, *, end_token: str | None = None, end_id: int | None = None
) -> Tokenizer:
    """Return the tokenizer "bytes" if `path` is None, else that of a tokenizer.json, recorded as `name`.

    `end_token` is the token that ends documents, and `end_id` its id if it is known; by default, it is the first of the
    usual ones that the tokenizer has.
    """
    if path is None:
        if end_token is not None:
            raise DataError(
                f"the end token is {end_token!r}, but the tokenizer bytes ends documents with id {_END_OF_TEXT}",
                code="data.end-token-of-bytes",
                fix="omit the end token, or pass the path of a tokenizer.json",
            )
        return ByteTokenizer()
    try:
        content = read_file(path)
    except FileNotFoundError:
        raise DataError(
            f"tokenizer {path} does not exist",
            code="data.tokenizer-missing",
            fix="pass the path of a tokenizer.json, or bytes",
        ) from None
    try:
        import tokenizers
    except ImportError:
        raise MissingExtraError.of(f"tokenizer {path}", "hf") from None
    try:
        model = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        raise DataError(
            f"{path} is not a tokenizer file ({error})",
            code="data.tokenizer-invalid",
            fix="pass a tokenizer.json of the tokenizers library, or bytes",
        ) from None
    model.no_truncation()
    model.no_padding()
    return FileTokenizer(
        name=TokenizerName(name=name, sha256=hashlib.sha256(content).hexdigest()),
        content=content,
        model=model,
        end_id=_find_end_id(path, model, end_token) if end_id is None else end_id,
        vocab_size=1 + max(model.get_vocab(with_added_tokens=True).values()),
    )


def _find_end_id(path: Location, model: Any, end_token: str | None) -> int:
    candidates = _END_TOKENS if end_token is None else (end_token,)
    for token in candidates:
        found = model.token_to_id(token)
        if found is not None:
            return int(found)
    raise DataError(
        f"tokenizer {path} has no token {' or '.join(candidates)} to end documents with",
        code="data.end-token-missing",
        fix="pass one of its tokens with --end-token",
    )


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 as the end of a document."""

    name: TokenizerName = _BYTES_NAME
    vocab_size: int = _END_OF_TEXT + 1
    end_id: int = _END_OF_TEXT
    content: bytes = b""

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the bytes of texts."""
        encoded = [text.encode() for text in texts if text]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1
        # One copy: the joined documents, whose separators are then replaced by the end-of-document id.
        joined = b"\0".join([*encoded, b""])
        tokens = np.frombuffer(joined, np.uint8).astype(token_dtype("uint16"))
        tokens[np.cumsum(lengths) - 1] = self.end_id
        return EncodedTexts(tokens, lengths, len(texts) - len(encoded))

    def decode(self, ids: NDArray[np.int64]) -> str:
        """Return the text of bytes; ids above 255 are left out, invalid UTF-8 is replaced."""
        return ids[ids < _END_OF_TEXT].astype(np.uint8).tobytes().decode(errors="replace")


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer of the tokenizers library."""

    name: TokenizerName
    content: bytes
    model: Any
    end_id: int
    vocab_size: int
    """One more than the largest id, which may exceed the number of tokens."""

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the tokens of texts, without the special tokens that a post-processor adds."""
        dtype = token_dtype(smallest_dtype(self.vocab_size))
        pieces = []
        for encoding in self.model.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            if ids:
                ids.append(self.end_id)
                pieces.append(np.array(ids, dtype))
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        tokens = np.concatenate([np.empty(0, dtype), *pieces])
        return EncodedTexts(tokens, lengths, len(texts) - len(pieces))

    def decode(self, ids: NDArray[np.int64]) -> str:
        """Return the text of token ids; special tokens are left out."""
        return str(self.model.decode(ids.tolist()))
