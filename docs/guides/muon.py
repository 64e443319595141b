"""A decoder on text, trained with Muon."""

import shardwise as sw

# <job>
job = sw.Job(
    model=lambda: sw.models.decoder("llama-tiny", vocab_size=256, context=128),
    data=sw.datasets.text(length=128),
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.muon(lr=0.02, adamw_lr=3e-3),
    schedule=sw.schedules.Cosine(warmup=20, floor=0.1),
    batch_size=32,
    steps=100,
)
# </job>
