"""A training script for one process: resume, mixed precision, accumulation, clipping, evaluation and checkpoints."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw

EPOCHS, CHECKPOINT = 3, Path("checkpoint")


def points(seed: int, length: int) -> TensorDataset:
    x = torch.randn(length, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Classifier(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.down(functional.gelu(self.up(x)))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world = sw.world()
    plan = sw.Plan.preset("fsdp", world.size, precision="bf16")
    train = sw.dataloader(DataLoader(points(0, 80), 8, shuffle=True), plan, world, accumulation=2)
    test = sw.dataloader(DataLoader(points(1, 30), 16), plan, world, evaluate=True)
    model = sw.parallelize(Classifier().to(device), plan, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sw.load(CHECKPOINT, {"model": model, "optimizer": optimizer, "train": train})
    for epoch in range(train.epoch, EPOCHS):
        losses, correct = 0.0, 0
        for inputs, labels in train:
            x, y = inputs.to(device), labels.to(device)
            with sw.no_sync(model, enabled=not train.is_update):
                with sw.autocast(plan):
                    loss = functional.cross_entropy(model(x), y)
                (loss * train.scale).backward()
            if train.is_update:
                sw.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses += loss.item()
        with torch.no_grad():
            for inputs, labels in test:
                x, y = inputs.to(device), labels.to(device)
                correct += (model(x).argmax(1) == y).sum().item()
        world.print(f"epoch {epoch}: loss {train.mean(losses) / len(train):.12f}, {test.sum(correct)} of 30 right")
        sw.save(CHECKPOINT, {"model": model, "optimizer": optimizer, "train": train}, step=epoch + 1)


if __name__ == "__main__":
    main()
