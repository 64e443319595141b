"""A small decoder for packed rows: tokens attend to their own document, and positions start at 0 in each."""

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

VOCABULARY = 257
"""Bytes, and the token that ends a document."""
LENGTH = 256
"""Tokens of a row."""
WIDTH, NUM_HEADS, NUM_BLOCKS = 64, 4, 2


# <mask>
def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Return bool [B, 1, T, T]: True where a query (row) may attend to a key (column)."""
    is_same = document_ids[:, :, None] == document_ids[:, None, :]
    is_before = torch.ones_like(is_same).tril()  # causal: never to a later token
    return (is_same & is_before)[:, None]  # for every head


# </mask>


class Block(nn.Module):
    """Attention and an MLP, each added to its input, [B, T, WIDTH] to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return x after attention where `mask` allows it, and after the MLP."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, NUM_HEADS, -1))  # [B, T, 3, heads, width of a head]
        query, key, value = heads.transpose(1, 3).unbind(2)
        attended = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.mlp_norm(x))))


# <decoder>
class Decoder(nn.Module):
    """Tokens, position ids and document ids, int64 [B, T], to logits of the next token, [B, T, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits; tokens of a row attend to those with the same document id."""
        x = self.embed(tokens) + self.position(position_ids)
        mask = document_mask(document_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


# </decoder>
