"""A decoder pretrained on a mixture of two corpora in packed rows, as a described job.

shardwise train pretrain.py --nproc 2
shardwise train pretrain.py --nproc 2 --plan fsdp
"""

from decoder import LENGTH, Decoder

import shardwise as sw

# <job>
job = sw.Job(
    model=Decoder,
    data=sw.datasets.tokens(
        {"code": "runs/code", "prose": "runs/prose"},  # as `shardwise data prepare` wrote them
        length=LENGTH,
        proportions={"code": 3, "prose": 1},  # of rows
        packed=True,
    ),
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=3e-3),
    batch_size=12,  # rows of a step, over all processes
    steps=40,
)
# </job>
