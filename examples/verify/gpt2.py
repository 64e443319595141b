"""A tiny GPT-2: learned positions, biases, and a head that is the embedding."""

from windows import windows

import shardwise as sw

job = sw.Job(
    model=lambda: sw.models.decoder("gpt2-tiny", width=32, num_layers=8, num_heads=4, context=16),
    data=windows,
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-2, weight_decay=0.1),
    schedule=sw.schedules.Linear(warmup=1),
    clip_norm=0.5,
    batch_size=40,
    steps=3,
)
