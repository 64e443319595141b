"""Which of torch's kinds of optimizer a factory makes, and that it trains as the plain one does."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise as sw
from shardwise.testing import run_ranks

FACTORIES = {"adamw": sw.adamw(lr=0.1), "sgd": sw.sgd(lr=0.1, momentum=0.9, weight_decay=0.1)}


def kind(optimizer):
    return [name for name in ("fused", "foreach") if optimizer.defaults[name]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FACTORIES)
def test_narrow_parameters_are_updated_on_a_cpu(name, dtype):
    parameter = nn.Parameter(torch.zeros(64, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    FACTORIES[name]([("weight", parameter)]).step()
    assert (parameter < 0).all()


@pytest.mark.parametrize("name", FACTORIES)
def test_whole_parameters_get_the_fused_kind(name):
    assert kind(FACTORIES[name](nn.Linear(2, 2).named_parameters())) == ["fused"]


def test_it_can_be_turned_off():
    assert kind(sw.sgd(lr=0.1, fused=False)(nn.Linear(2, 2).named_parameters())) == []


def test_shards_get_the_fastest_available_kind_and_train_as_whole_parameters_do():
    torch.manual_seed(0)
    values, grads = torch.randn(2, 4, 3), torch.randn(3, 2, 4, 3)

    def trained(factory, parameters, share):
        optimizer = factory((str(index), parameter) for index, parameter in enumerate(parameters))
        for step in grads:
            for parameter, grad in zip(parameters, step, strict=True):
                parameter.grad = share(grad)
            optimizer.step()
        return kind(optimizer), [getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in parameters]

    def body(_):
        mesh = init_device_mesh("cpu", (2,))

        def sharded(tensor):
            return distribute_tensor(tensor, mesh, [Shard(0)])

        found = {}
        for name, factory in FACTORIES.items():
            _, expected = trained(factory, [nn.Parameter(value.clone()) for value in values], lambda grad: grad)
            found[name], weights = trained(factory, [nn.Parameter(sharded(value)) for value in values], sharded)
            torch.testing.assert_close(weights, expected)
        return found

    assert run_ranks(body, 2) == [{"adamw": ["fused"], "sgd": ["foreach"]}] * 2


def test_shards_beside_whole_parameters_are_left_to_torch():
    def body(_):
        shard = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        assert isinstance(shard, DTensor)
        return kind(FACTORIES["sgd"]([("sharded", nn.Parameter(shard)), ("whole", nn.Parameter(torch.ones(2, 2)))]))

    assert run_ranks(body, 1) == [[]]


def test_momentum_of_a_skipped_first_step_is_none():
    (weight,) = [torch.nn.Parameter(torch.ones(2048))]
    optimizer = sw.sgd(lr=0.1, momentum=0.9)([("weight", weight)])
    weight.grad = torch.full_like(weight, float("inf"))
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())  # as a skipped step on a GPU has it
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.zeros(2048))
    assert torch.equal(weight.detach(), torch.ones(2048))


def test_a_parameter_may_get_its_first_gradient_late():
    first, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = sw.sgd(lr=0.1, momentum=0.9)([("first", first), ("late", late)])
    first.grad = torch.ones(3)
    optimizer.step()
    late.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(late.detach(), torch.full((3,), 0.9))
