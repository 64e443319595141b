"""A tiny Llama: rotary positions, grouped heads, a head of its own."""

from windows import windows

import shardwise as sw

job = sw.Job(
    model=lambda: sw.models.decoder(
        "llama-tiny", width=32, num_layers=8, num_heads=8, num_kv_heads=4, mlp_width=48, context=16
    ),
    data=windows,
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-2, weight_decay=0.1),
    schedule=sw.schedules.Cosine(warmup=1, floor=0.1),
    clip_norm=0.5,
    batch_size=40,
    steps=3,
)
