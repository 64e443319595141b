"""Packing: every token of every document once, no row longer than it may be, few rows."""

import itertools

import numpy as np
import pytest

from shardwise.data.packing import pack


def row_of(packed, index):
    """Return documents, starts and lengths of the pieces of one row."""
    here = slice(packed.offsets[index], packed.offsets[index + 1])
    return packed.documents[here], packed.starts[here], packed.lengths[here]


def tokens_of(packed, row_length):
    """Return (document, token) of every token, after checking each row."""
    found = []
    for index in range(packed.num_rows):
        documents, starts, lengths = row_of(packed, index)
        assert 0 < lengths.sum() <= row_length
        for document, start, length in zip(documents, starts, lengths, strict=True):
            found += [(int(document), token) for token in range(start, start + length)]
    return found


@pytest.mark.parametrize("row_length", [1, 7, 64])
def test_every_token_is_in_one_row(row_length):
    lengths = np.random.default_rng(row_length).integers(0, 150, 200)
    found = tokens_of(pack(lengths, row_length), row_length)
    expected = [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    assert sorted(found) == expected


def test_documents_fill_the_fullest_row_that_has_space():
    packed = pack(np.array([6, 3, 5, 2, 4]), 10)
    rows = [row_of(packed, index)[0].tolist() for index in range(packed.num_rows)]
    assert rows == [[0, 4], [1, 2, 3]]  # 6 + 4, and 3 + 5 + 2


def test_packing_needs_at_most_11_ninths_of_the_fewest_rows():
    generator = np.random.default_rng(1)
    for _ in range(30):
        lengths = generator.integers(1, 101, 7)
        best = min(first_fit(order, 100) for order in itertools.permutations(lengths.tolist()))
        assert pack(lengths, 100).num_rows <= 11 / 9 * best + 6 / 9


def first_fit(lengths, row_length):
    rows = []
    for length in lengths:
        for index, used in enumerate(rows):
            if used + length <= row_length:
                rows[index] += length
                break
        else:
            rows.append(length)
    return len(rows)


def test_long_document_is_split():
    packed = pack(np.array([25]), 10)
    assert [row_of(packed, index)[2].tolist() for index in range(3)] == [[10], [10], [5]]
    assert pack(np.array([], dtype=np.int64), 10).num_rows == 0
