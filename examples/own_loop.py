"""Three depths inside Python: my own loop, my loop over steps, no loop."""

import torch

import shardwise as sw


class Points(torch.utils.data.Dataset):
    """Points with two classes, split by a line."""

    def __len__(self):
        return 500

    def __getitem__(self, index):
        point = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return point, (point.sum() > 0).long()


job = sw.Job(
    model=lambda: torch.nn.Linear(4, 2),
    data=lambda split: Points() if split == "train" else None,
    loss=sw.losses.cross_entropy,
    optimizer=sw.sgd(lr=0.5),
    batch_size=64,
    epochs=3,
)

if __name__ == "__main__":
    # <depths>
    with sw.world() as world:
        plan = sw.Plan.preset("ddp", world.size, batch_size=job.batch_size)
        model = sw.parallelize(torch.nn.Linear(4, 2), plan, world)  # 1. my loop, my loss.backward()
        step = sw.build_step(job, plan, world)  # 2. my loop, any strategy
        for batch in step.feed:
            report = step(batch)  # one optimizer step
        sw.train(job, plan, world)  # 3. no loop
    # </depths>
