"""A described job on text: a small Llama-shaped decoder that learns the bytes of Python's own sources."""

import shardwise as sw

# <job>
job = sw.Job(
    model=lambda: sw.models.decoder("llama-tiny", vocab_size=256, context=128),
    data=sw.datasets.text(length=128),  # windows of bytes; the targets are shifted by one byte
    loss=sw.losses.token_cross_entropy,  # sum over tokens, divided by their number in the global batch
    optimizer=sw.adamw(lr=3e-3),
    schedule=sw.schedules.Cosine(warmup=20, floor=0.1),
    clip_norm=1.0,
    batch_size=32,
    steps=100,
    metrics={"accuracy": sw.metrics.token_accuracy},
)
# </job>
