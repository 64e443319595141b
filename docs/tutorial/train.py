"""Train a classifier in one process, in plain PyTorch."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def points(length: int) -> TensorDataset:
    x = torch.randn(length, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def main() -> None:
    # <loop>
    torch.manual_seed(0)
    train = DataLoader(points(512), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(3):
        for x, y in train:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    # </loop>


if __name__ == "__main__":
    main()
