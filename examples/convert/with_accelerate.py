"""A training script for one process: resume, mixed precision, accumulation, clipping, evaluation and checkpoints."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

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
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, split_batches=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train = DataLoader(points(0, 80), 8, shuffle=True)
    test = DataLoader(points(1, 30), 16)
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    first = 0
    if CHECKPOINT.exists():
        accelerator.load_state(CHECKPOINT)
        first = torch.load(CHECKPOINT / "epoch")
    for epoch in range(first, EPOCHS):
        losses, correct = 0.0, 0
        for inputs, labels in train:
            x, y = inputs.to(device), labels.to(device)
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses += accelerator.gather(loss).mean().item()
        with torch.no_grad():
            for inputs, labels in test:
                x, y = inputs.to(device), labels.to(device)
                correct += accelerator.gather_for_metrics(model(x).argmax(1) == y).sum().item()
        accelerator.print(f"epoch {epoch}: loss {losses / len(train):.12f}, {correct} of 30 right")
        accelerator.save_state(CHECKPOINT)
        accelerator.save(epoch + 1, CHECKPOINT / "epoch")


if __name__ == "__main__":
    main()
