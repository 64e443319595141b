"""Training in plain MLX, on one process or several: the step that is often shown, why it fails, and the one that works.

One process: `python plain_mlx.py`. Two: `mlx.launch -n 2 --backend ring python plain_mlx.py`.
"""

import os
import tempfile
from functools import partial
from pathlib import Path

import mlx.core as mx
from mlx import nn, optimizers

ROWS, STEPS = 64, 20


# <shown>
def shown_step(model, x, y, optimizer):
    def loss_fn(model):
        pred = model(x)
        return mx.mean((pred - y) ** 2)

    loss, grads = mx.value_and_grad(loss_fn)(model)  # of every array in the model, frozen ones too
    optimizer.update(model, grads)
    return loss
    # </shown>


# <works>
def make_step(model, optimizer, group):
    def loss_fn(x, y):
        return mx.mean((model(x) - y) ** 2)

    state = [model.state, optimizer.state]

    # Arguments are arrays. What the step changes besides is named: else it would be compiled in as a constant.
    @partial(mx.compile, inputs=state, outputs=state)
    def step(x, y):
        loss, grads = nn.value_and_grad(model, loss_fn)(x, y)  # of what is trained
        grads = nn.average_gradients(grads, group)  # nothing to do on one process
        optimizer.update(model, grads)
        return mx.distributed.all_sum(loss, group=group) / group.size()

    return step, state
    # </works>


def network():
    mx.random.seed(0)  # the same first weights on every process
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def data():
    x = mx.random.normal((ROWS, 8), key=mx.random.key(1))
    return x, mx.sin(x.sum(axis=1, keepdims=True))


def try_shown_step():
    """Run the step that is often shown, as it is and compiled; return its losses, and MLX's error for the second."""
    (x, y), (model, optimizer) = data(), (network(), optimizers.SGD(0.1))
    losses = [shown_step(model, x, y, optimizer).item() for _ in range(STEPS)]
    try:
        mx.compile(shown_step)(model, x, y, optimizer)
    except ValueError as error:
        return losses, str(error)
    return losses, ""


def vectorize():
    """Map a function of one sample over all; return the shape of its gradients, and how far loop and batch differ."""
    (x, y), model = data(), network()

    def loss_of_one(parameters, row, target):
        model.update(parameters)
        return mx.sum((model(row) - target) ** 2)

    # <vmap>
    # loss_of_one(parameters, row, target) is the loss of a single sample: [8] and [1] to a number
    parameters, each = model.trainable_parameters(), (None, 0, 0)  # the same parameters for every sample
    losses = mx.vmap(loss_of_one, in_axes=each)(parameters, x, y)  # [64], without a loop over samples
    gradients = mx.vmap(mx.grad(loss_of_one), in_axes=each)(parameters, x, y)  # one gradient for each sample
    # </vmap>
    of_samples = gradients["layers"][0]["weight"]
    looped = mx.stack([loss_of_one(parameters, row, target) for row, target in zip(x, y, strict=True)])
    _, of_batch = nn.value_and_grad(model, lambda x, y: mx.mean((model(x) - y) ** 2))(x, y)
    distances = (losses - looped, of_samples.mean(axis=0) - of_batch["layers"][0]["weight"])
    return of_samples.shape, max(mx.abs(distance).max().item() for distance in distances)


def keep_kernels_apart(group):
    """For a CPU, MLX compiles into one folder for all processes, and can load what another is still writing."""
    folder = Path(tempfile.gettempdir(), f"plain-mlx-{os.getuid()}-{group.rank()}")
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(folder)


def main():
    group = mx.distributed.init()  # of one process, where nobody started more
    keep_kernels_apart(group)
    # <train>
    model, optimizer = network(), optimizers.SGD(0.1)
    step, state = make_step(model, optimizer, group)
    x, y = data()
    mine = slice(group.rank(), None, group.size())  # every process its rows, as many as the others
    losses = []
    for _ in range(STEPS):
        loss = step(x[mine], y[mine])
        mx.eval(loss, state)  # until here nothing was computed, and nothing sent
        losses.append(loss.item())
    # </train>
    if group.rank() == 0:
        shown, complaint = try_shown_step()
        print(f"processes {group.size()}   first loss {losses[0]:.6f}   last loss {losses[-1]:.6f}")
        print(f"the step that is shown, not compiled: last loss {shown[-1]:.6f}")
        print(f"compiled: {complaint}")
        shape, distance = vectorize()
        print(f"vmap over {ROWS} samples: gradients {shape}, distance to a loop and to the batch {distance:.0e}")


if __name__ == "__main__":
    main()
