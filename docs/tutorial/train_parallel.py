"""The loop of train.py on any number of processes: python train_parallel.py PLAN EPOCHS CHECKPOINTS."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from train import points

import shardwise as sw


def main(name: str, epochs: int, checkpoints: str) -> None:
    # <loop>
    torch.manual_seed(0)
    world = sw.world()
    plan = sw.Plan.preset(name, world.size)
    train = sw.dataloader(DataLoader(points(512), batch_size=64, shuffle=True), plan, world)
    model = sw.parallelize(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2)), plan, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "train": train}
    sw.load(checkpoints, state)
    for epoch in range(train.epoch, epochs):
        for x, y in train:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        world.print(f"epoch {epoch}: loss {train.mean(loss.item()):.4f}")
        sw.save(checkpoints, state, step=epoch + 1)
    sw.export(model, f"{checkpoints}/model.pt")
    # </loop>


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
