"""One model in torch and in MLX: the same weights, outputs, gradients and training steps of both."""

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from shardwise.checkpoint.convert.convert import convert
from shardwise.checkpoint.spec import ConvertSpec


def load_into_mlx(model, other, folder):
    """Give the MLX model the torch model's weights, by way of the files that `checkpoint convert` writes."""
    torch.save(model.state_dict(), folder / "torch.pt")
    convert(ConvertSpec(source=folder / "torch.pt", target=folder / "mlx.safetensors", to="mlx"))
    other.load_weights(str(folder / "mlx.safetensors"))


def load_into_torch(other, model, folder):
    """Give the torch model the MLX model's weights, by way of files."""
    other.save_weights(str(folder / "saved.safetensors"))
    convert(ConvertSpec(source=folder / "saved.safetensors", target=folder / "from_mlx.pt", to="torch"))
    state = torch.load(folder / "from_mlx.pt")
    # A tied head stands in no file of MLX's own; torch's state dict names it a second time.
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert unexpected == []
    assert set(missing) <= {"head.weight"}


def as_torch(array):
    return torch.from_numpy(np.array(array))


def as_mlx(tensor):
    import mlx.core as mx

    return mx.array(tensor.numpy(), mx.float64 if tensor.dtype == torch.float64 else None)


def shake(model):
    """Give every parameter a spread: fresh biases are zero and norms one, which hides mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def gradients_in_torch(model, inputs, labels):
    """Return the mean cross entropy and its gradients by name."""
    loss = cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def gradients_in_mlx(model, inputs, labels):
    """Return the same from MLX, in torch's form."""
    from mlx import nn
    from mlx.utils import tree_flatten

    def loss_of(inputs, labels):
        return nn.losses.cross_entropy(model(inputs), labels, reduction="mean")

    loss, gradients = nn.value_and_grad(model, loss_of)(as_mlx(inputs), as_mlx(labels))
    found = {name: as_torch(gradient) for name, gradient in tree_flatten(gradients)}
    return loss.item(), {name: grad.movedim(-1, 1) if grad.dim() == 4 else grad for name, grad in found.items()}


def train_in_torch(model, batches, lr):
    """Return the losses of AdamW's steps over the batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    losses = []
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_in_mlx(model, batches, lr):
    """Return the losses of MLX's AdamW, configured to correct its bias as torch does."""
    import mlx.core as mx
    from mlx import nn, optimizers

    optimizer = optimizers.AdamW(lr, weight_decay=0.1, bias_correction=True)

    def loss_of(inputs, labels):
        return nn.losses.cross_entropy(model(inputs), labels, reduction="mean")

    losses = []
    for inputs, labels in batches:
        loss, gradients = nn.value_and_grad(model, loss_of)(as_mlx(inputs), as_mlx(labels))
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state, loss)
        losses.append(loss.item())
    return losses
