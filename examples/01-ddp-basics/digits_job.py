"""`train_ddp.py` as a described job: the same network, and no line about ranks.

shardwise train digits_job.py --nproc 2
"""

from resnet import resnet18

import shardwise as sw

# <job>
job = sw.Job(
    model=resnet18,  # the network of train_ddp.py
    data=sw.datasets.digits,  # callable: split -> Dataset
    loss=sw.losses.cross_entropy,  # Loss(sum=(output, batch) -> scalar, count=(batch) -> int)
    optimizer=sw.adamw(lr=1e-3),  # any factory (named parameters) -> Optimizer
    schedule=sw.schedules.Cosine(warmup=0.1),
    batch_size=128,  # the GLOBAL batch size; the plan sets micro-batch and accumulation
    epochs=3,  # or steps=, or tokens=
    metrics={"accuracy": sw.metrics.accuracy},
)
# </job>
