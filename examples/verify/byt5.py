"""A tiny ByT5 by transformers: an encoder and a decoder, dropout (which verify switches off), its own mean loss."""

from windows import gaps

import shardwise as sw


def count_labels(batch):
    return (batch["labels"] != -100).sum()


job = sw.Job(
    model=lambda: sw.models.byt5("byt5-tiny", d_model=32, d_kv=8, d_ff=48),
    data=gaps,
    loss=sw.losses.returned_by_model(count_labels),
    optimizer=sw.adamw(lr=1e-2),
    clip_norm=0.5,
    batch_size=40,
    steps=3,
)
