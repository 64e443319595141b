"""Attention inside documents: blocks select the pairs of the mask, whatever the documents."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from shardwise.models.documents import (
    BLOCK,
    attend,
    block_attention,
    document_blocks,
    document_mask,
    number_documents,
    restrict,
)
from shardwise.torch_private.dynamo import graph_break


def ids_of(lengths, total):
    """Return the ids [1, total] of documents with these lengths; the rest of the row is one more."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return torch.nn.functional.pad(ids, (0, total - len(ids)), value=len(lengths))[None]


ROWS = {
    "one document": ids_of([], 400),
    "documents of one token": torch.arange(300)[None],
    "at the edges of blocks": ids_of([BLOCK, BLOCK, 2 * BLOCK], 5 * BLOCK),
    "one token beside the edges": ids_of([BLOCK - 1, BLOCK + 2, 3 * BLOCK], 6 * BLOCK),
    "less than a block": ids_of([5, 7], 20),
    "several rows": torch.cat([ids_of([100, 300], 500), ids_of([], 500), ids_of([3, 3, 490], 500)]),
}


def allowed(blocks, numbers):
    """Return the pairs [batch, tokens, tokens] that these blocks compute."""
    batch, length = numbers.shape
    tested = create_mask(blocks.mask_mod, batch, 1, length, length, device="cpu")[:, 0]
    pairs = torch.zeros_like(tested)
    kinds = (
        (blocks.kv_num_blocks, blocks.kv_indices, False),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, True),
    )
    for counts, indices, is_full in kinds:
        for row in range(batch):
            for query, count in enumerate(counts[row, 0].tolist()):
                for key in indices[row, 0, query, :count].tolist():
                    here = row, slice(query * BLOCK, (query + 1) * BLOCK), slice(key * BLOCK, (key + 1) * BLOCK)
                    assert not pairs[here].any()  # no block is listed twice
                    pairs[here] = True if is_full else tested[here]
    return pairs


@pytest.mark.parametrize("name", ROWS)
def test_blocks_compute_the_pairs_of_the_mask(name):
    numbers = number_documents(ROWS[name])
    assert allowed(document_blocks(numbers), numbers).equal(document_mask(numbers)[:, 0])


def test_blocks_skip_what_no_document_shares_and_have_one_shape():
    many, one = (
        document_blocks(number_documents(ids)) for ids in (torch.arange(1024)[None] // 128, ROWS["one document"])
    )
    assert many.kv_num_blocks.sum() == 8  # the diagonal only
    assert many.full_kv_num_blocks.sum() == 0
    assert one.full_kv_num_blocks.tolist() == [[[0, 1, 2, 0]]]  # the last block of 400 tokens is not whole
    other = document_blocks(number_documents(torch.zeros(1, 1024, dtype=torch.int64)))
    assert [part.shape for part in other.as_tuple() if isinstance(part, torch.Tensor)] == [
        part.shape for part in many.as_tuple() if isinstance(part, torch.Tensor)
    ]


def test_flex_attention_over_blocks_is_attention_with_the_mask():
    torch.manual_seed(0)
    numbers = number_documents(ROWS["several rows"])
    query = torch.randn(3, 4, 500, 16, dtype=torch.float64)
    key, value = torch.randn(2, 3, 2, 500, 16, dtype=torch.float64).unbind()
    found = flex_attention(query, key, value, block_mask=document_blocks(numbers), enable_gqa=True)
    expected = attend(query, key, value, document_mask(numbers), enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_mask_is_used_on_the_cpu_and_an_id_that_returns_is_a_new_document():
    mask = restrict(torch.tensor([[7, 7, 3, 7]]), torch.zeros(1, 4, 8, dtype=torch.bfloat16))
    assert mask[0, 0].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]


def test_compiled_attention_has_one_graph_for_all_documents():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def attended(inputs, ids):
        blocks = document_blocks(number_documents(ids))
        graph_break()  # as in Decoder.forward, which a plan compiles whole
        return block_attention(*inputs, blocks)

    run = torch.compile(attended, backend=backend)
    inputs = tuple(torch.randn(2, 2, 512, 16) for _ in range(3))
    for documents in (1, 5, 500):
        ids = torch.arange(512).expand(2, -1) * documents // 512
        found = run(inputs, ids)
        torch.testing.assert_close(found, attend(*inputs, document_mask(ids), enable_gqa=False))
    assert len(graphs) == 2  # before and after the break
