"""The smallest described job: a ResNet that reads scanned handwritten digits."""

import shardwise as sw

# <job>
job = sw.Job(
    model=lambda: sw.models.resnet18(num_classes=10, in_channels=1, stem="small"),
    data=sw.datasets.digits,  # callable: split -> Dataset
    loss=sw.losses.cross_entropy,  # Loss(sum=(output, batch) -> scalar, count=(batch) -> int)
    optimizer=sw.adamw(lr=1e-3),  # any factory (named parameters) -> Optimizer
    schedule=sw.schedules.Cosine(warmup=0.1),
    batch_size=128,  # the GLOBAL batch size; the plan sets micro-batch and accumulation
    epochs=6,  # or steps=, or tokens=
    metrics={"accuracy": sw.metrics.accuracy},
)
# </job>
