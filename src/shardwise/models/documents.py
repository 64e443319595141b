"""Attention inside the documents of packed rows: by a mask, or on a GPU by FlexAttention over blocks of tokens.

A mask has length x length entries that every layer reads, and kernels compute all pairs of tokens. FlexAttention (Dong
et al. 2024) computes only the listed blocks of 128 x 128 pairs. Documents are numbered along a row, so that a block of
tokens has an interval of numbers, and two blocks share a document if their intervals overlap: the lists follow from the
first and last number of each block. Their shapes depend on the length of a row, not on its number of documents, and
nothing is read back to the host; therefore a compiled or captured step has one shape. The lists replace cumulative
lengths, which would need as many entries as a row can have documents. The mask is the reference: it is used on the CPU,
in fp32 and fp64, and under context parallelism.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own custom
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.overrides import handle_torch_function, has_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 128
"""Tokens of a block, the default of FlexAttention."""

Documents = Tensor | BlockMask
"""Which pairs of tokens attend: a bool mask [batch, 1, tokens, tokens], or blocks."""

_HAS_TRITON = find_spec("triton") is not None
"""FlexAttention is compiled to Triton kernels; without a compiler it would materialize all scores."""
_LOWER = (torch.bfloat16, torch.float16)


def restrict(document_ids: Tensor, like: Tensor) -> Documents:
    """Return the pairs of tokens that attend in rows with these int64 ids [batch, tokens], for activations as `like`.

    The tokens of a document are adjacent: an id that occurs again after another one is a new document.
    """
    numbers = number_documents(document_ids)
    if uses_blocks(like) and document_ids.shape[1] == like.shape[1]:  # cp passes the ids of all its slices
        return document_blocks(numbers)
    return document_mask(numbers)


def uses_blocks(like: Tensor) -> bool:
    """Return whether attention to activations as `like` uses blocks: on a GPU in bf16 or fp16, with Triton."""
    if not like.is_cuda or not _HAS_TRITON:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else like.dtype
    return dtype in _LOWER


def number_documents(document_ids: Tensor) -> Tensor:
    """Return the numbers of documents, int64 [batch, tokens], counted from 0 in each row."""
    return F.pad(document_ids.diff(dim=1) != 0, (1, 0)).cumsum(dim=1)


def document_mask(numbers: Tensor) -> Tensor:
    """Return the causal mask, bool [batch, 1, tokens, tokens], of rows in which documents must not attend to others."""
    num_tokens = numbers.shape[1]
    is_before = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=numbers.device).tril()
    is_same = numbers[:, :, None] == numbers[:, None, :]
    return (is_same & is_before)[:, None]


def document_blocks(numbers: Tensor) -> BlockMask:
    """Return the blocks with pairs of `document_mask`; in full blocks, all pairs attend and no pair is tested."""
    length = numbers.shape[1]
    starts = torch.arange(0, length, BLOCK, device=numbers.device)
    first, last = numbers[:, starts], numbers[:, (starts + BLOCK).clamp(max=length) - 1]
    place = torch.arange(len(starts), device=numbers.device)
    is_before = place[:, None] > place[None, :]
    shares = last[:, None, :] >= first[:, :, None]  # [batch, query block, key block], for keys before queries
    is_one = first[:, None, :] == last[:, :, None]
    is_whole = (starts + BLOCK <= length)[:, None]
    full = is_before & is_one & is_whole
    partial = (is_before & shares & ~full) | (place[:, None] == place[None, :])

    def attends(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (numbers[row, query] == numbers[row, key])

    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=(length, length)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, and all key blocks with these first: with 1 head, int32."""
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts[:, None], order.to(torch.int32)[:, None].contiguous()


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, *, enable_gqa: bool) -> Tensor:
    """Return causal attention over [batch, heads, tokens, width], inside of `documents` if they are given."""
    if isinstance(documents, BlockMask):
        return block_attention(query, key, value, documents, enable_gqa=enable_gqa)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=documents, is_causal=documents is None, enable_gqa=enable_gqa
    )


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, *, enable_gqa: bool = False
) -> Tensor:
    """Return attention by FlexAttention; a torch function mode can intercept it, like torch's own attention."""
    inputs = (query, key, value)
    if has_torch_function(inputs):
        intercepted: Tensor = handle_torch_function(block_attention, inputs, *inputs, blocks, enable_gqa=enable_gqa)
        return intercepted
    if torch.compiler.is_compiling():
        return flex_attention(query, key, value, block_mask=blocks, enable_gqa=enable_gqa)
    attended: Tensor = _compiled_flex()(query, key, value, block_mask=blocks, enable_gqa=enable_gqa)
    return attended


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Return FlexAttention as kernels of its own, for steps that are not compiled."""
    return torch.compile(flex_attention, dynamic=False)
