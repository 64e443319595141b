"""torch's own transformer layers, sharded over ranks, compute what they do in one process: training and inference."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.parallel.tensor import tensor_parallel
from shardwise.testing import run_ranks

RULES = {"layers.*.linear1": "column", "layers.*.linear2": "row"}


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


@pytest.mark.slow
def test_encoder_layers_of_torch_train_and_infer_as_in_one_process():
    def body(world):
        model = encoder()
        parallel = tensor_parallel(copy.deepcopy(model), init_device_mesh("cpu", (world.size,)), RULES, sequence=False)
        x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for each in (model, parallel):
            each(x).square().sum().backward()
        for expected, found in zip(model.parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
        with torch.no_grad():
            torch.testing.assert_close(parallel.eval()(x), model.eval()(x))

    run_ranks(body, 2)
