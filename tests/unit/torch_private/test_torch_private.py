"""Private names of torch do what their docstrings describe; a torch without one is refused or has a fallback."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

from refusals import refuses
from shardwise.torch_private import dispatch, distributed, dynamo


def test_launchers_and_the_recorder_read_names_without_importing_torch():
    code = "import sys; from shardwise.torch_private import distributed; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_name_that_nothing_can_stand_in_for_is_refused_with_the_version_of_torch():
    with refuses("world.torch-name-missing", torch.__version__, "_gone"):
        distributed.required(torch.cuda, "_gone")


def test_the_sequence_number_of_a_running_node_identifies_its_module():
    seen = []

    def note(_):
        seen.append((dispatch.is_in_backward(), dispatch.running_sequence_number()))

    x = torch.ones(2, requires_grad=True)
    first = dispatch.next_sequence_number()
    hidden = x * 2
    second = dispatch.next_sequence_number()
    hidden.register_hook(note)
    (hidden * hidden).sum().backward()
    ((inside, number),) = seen
    assert inside
    assert first <= number
    assert second > first
    assert not dispatch.is_in_backward()
    assert dispatch.running_sequence_number() is None


def test_a_callback_runs_when_backward_ends():
    order = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: dispatch.call_after_backward(lambda: order.append("after")))
    (x * x).backward()
    order.append("returned")
    assert order == ["after", "returned"]


def test_hooks_on_gradients_are_seen_and_shared():
    plain, hooked, late = (nn.Parameter(torch.ones(1)) for _ in range(3))
    hooked.register_hook(lambda gradient: gradient)
    late.register_post_accumulate_grad_hook(lambda _: None)
    assert [dispatch.has_gradient_hooks(each) for each in (plain, hooked, late)] == [False, True, True]
    assert [dispatch.has_accumulation_hooks(each) for each in (plain, hooked, late)] == [False, False, True]
    dispatch.share_gradient_hooks(hooked, plain)
    assert dispatch.has_gradient_hooks(plain)


@pytest.mark.parametrize(
    ("owner", "name", "ask", "answer"),
    [
        (torch._C, "_current_graph_task_id", dispatch.is_in_backward, False),
        (torch._C, "_current_autograd_node", dispatch.running_sequence_number, None),
        (torch._C._autograd, "_get_sequence_nr", dispatch.next_sequence_number, 0),
        (torch.cuda, "_is_in_bad_fork", distributed.was_cuda_used, False),
        (distributed_c10d, "_world", lambda: list(distributed.groups_with_stores()), []),
        (
            torch._C._distributed_c10d,
            "_dump_fr_trace",
            lambda: distributed.flight_records(entries=True, stacks=False),
            {},
        ),
    ],
)
def test_a_torch_without_a_name_gives_the_documented_answer(monkeypatch, owner, name, ask, answer):
    monkeypatch.delattr(owner, name)
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_nccl_trace", raising=False)  # builds with NCCL have it too
    assert ask() == answer


def test_versions_and_storages_distinguish_tensors():
    tensor = torch.zeros(2)
    view, other = tensor.view(2), torch.zeros(2)
    before = dispatch.version_of(tensor)
    view.add_(1)
    assert dispatch.version_of(tensor) == before + 1
    with torch.inference_mode():
        assert dispatch.version_of(torch.zeros(1)) == 0
    ids = [dispatch.storage_id(each.untyped_storage()) for each in (tensor, view, other)]
    assert ids[0] == ids[1] != ids[2]
    on_meta = [torch.zeros(1, device="meta") for _ in range(2)]
    assert len({dispatch.storage_id(each.untyped_storage()) for each in on_meta}) == 2


def test_kernels_over_lists_compute_what_torch_computes_tensor_by_tensor():
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert [float(norm) for norm in dispatch.norms_of(tensors)] == [5.0, 1.0]
    dispatch.multiply_all(tensors, torch.tensor(2.0))
    copies = [torch.empty(2), torch.empty(1)]
    dispatch.copy_all(copies, tensors)
    assert [each.tolist() for each in copies] == [[6.0, 8.0], [2.0]]
    flag = torch.zeros(1)
    dispatch.check_finite(tensors, flag, torch.tensor([0.5]))
    assert (tensors[0].tolist(), float(flag)) == ([3.0, 4.0], 0.0)
    dispatch.check_finite([torch.tensor([float("inf")])], flag, torch.ones(1))
    assert float(flag) == 1.0
    scale, steps = torch.tensor(8.0), torch.zeros((), dtype=torch.int32)
    dispatch.update_loss_scale(scale, steps, flag.squeeze(), growth=2.0, backoff=0.5, interval=10)
    assert float(scale) == 4.0


def test_attention_kernels_of_cuda_have_shapes_on_meta():
    query = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")
    options = {"dropout": 0.0, "is_causal": True, "scale": None}
    assert dispatch.flash_attention(query, query, query, **options).shape == query.shape
    assert dispatch.efficient_attention(query, query, query, bias=None, **options).shape == query.shape


def test_own_registries_list_tied_parameters_and_repeated_children():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, layer)
    assert list(dispatch.own_modules(model)) == ["0", "1"]
    assert set(dispatch.own_parameters(layer)) == {"weight", "bias"}
    assert set(dispatch.own_buffers(nn.BatchNorm1d(2))) == {"running_mean", "running_var", "num_batches_tracked"}
    assert vars(layer).keys() >= dispatch.REGISTRIES
    assert not dispatch.is_compiled(layer)


def test_convolutions_are_padded_as_their_modules_are():
    images = torch.randn(1, 2, 5, 5)
    plain = nn.Conv2d(2, 3, 3, stride=2, padding=1, padding_mode="circular")
    assert torch.equal(dispatch.padded_convolution(plain, images, plain.weight, plain.bias), plain(images))
    transposed = nn.ConvTranspose2d(2, 3, 3, stride=2)
    size = transposed(images, output_size=[12, 12]).shape[-1]
    assert dispatch.transposed_padding(transposed, images, [12, 12]) == [size - transposed(images).shape[-1]] * 2


def test_a_copied_optimizer_has_step_hooks_of_its_own():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("the hook of the original ran"))
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    dispatch.drop_step_hooks(trial)
    trial.step()
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_tensors_that_are_not_sharded_are_their_own_local_tensor():
    tensor = torch.ones(1)
    assert distributed.local_tensor(tensor) is tensor
    assert list(distributed.parameter_groups(nn.Linear(1, 1))) == []


def test_a_fixed_size_is_a_constant_of_a_compiled_graph():
    shapes = []

    def record(graph, inputs):
        shapes.append([each.shape for each in inputs if isinstance(each, torch.Tensor)])
        return graph.forward

    def double(x):
        dynamo.fix_size(x.shape[1], 16)
        return x * 2

    compiled = torch.compile(double, dynamic=True, backend=record)
    for rows in (3, 5):
        assert torch.equal(compiled(torch.ones(rows, 16)), torch.full((rows, 16), 2.0))
    ((shape,),) = shapes
    assert shape[1] == 16
    assert type(shape[1]) is int
    with pytest.raises(RuntimeError):
        double(torch.ones(3, 17))
