"""`deepspeed_train.py` as a described job: the plan writes the DeepSpeed JSON.

shardwise train decoder_job.py --nproc 2 --plan zero2 --set engine=deepspeed
"""

from byte_decoder import LENGTH, Decoder

import shardwise as sw

# <job>
job = sw.Job(
    model=Decoder,  # the decoder of deepspeed_train.py
    data=sw.datasets.text(length=LENGTH),  # windows of bytes; the targets are shifted by one byte
    loss=sw.losses.token_cross_entropy,  # sum over tokens, divided by their number in the global batch
    optimizer=sw.adamw(lr=3e-3),
    clip_norm=1.0,
    batch_size=32,
    steps=20,
)
# </job>
