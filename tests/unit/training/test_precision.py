"""Low precision under every strategy and after resume: bf16 moments and parameters, 8-bit moments, float8 layers."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import shardwise as sw
from jobs import FP64, points_job, sentences_job
from refusals import refuses
from shardwise.checkpoint import read_manifest, write
from shardwise.engines.engine import require_supported
from shardwise.job.optimizers import SGD
from shardwise.parallel import support
from shardwise.parallel.mixed_adamw import Counter, random_bits, round_stochastically
from shardwise.parallel.optimizer import is_faster_compiled, mixed_optimizer
from shardwise.planner.settle import LocalDevice, settle
from shardwise.plans import Offload, Plan, Precision
from shardwise.testing import run_ranks
from shardwise.training.build import build_step
from shardwise.training.preflight import check_own_loop, check_precision_of
from shardwise.training.saving import state_of

STEPS, SAVED = 6, 3
BF16_STATES = dataclasses.replace(FP64, optimizer="bf16")
MASTERS = Precision(parameter="bf16", compute="bf16", reduce="bf16")
WITHOUT_MASTERS = dataclasses.replace(MASTERS, master="none", optimizer="bf16")
LAYOUTS = {"one": 1, "ddp": 2, "zero1": 2, "fsdp": 2, "tp": 2, "cp": 2, "pp": 2, "shard2.tp2": 4}
make_job = functools.partial(sentences_job, "llama-tiny", steps=STEPS)


def plan_of(name, precision, **changes):
    plan = settle(
        "ddp" if name == "one" else name, batch_size=8, world_size=LAYOUTS[name], device=LocalDevice(), overrides={}
    )
    return dataclasses.replace(plan, precision=precision, **changes)


def loss_of(report, world):
    """Return the global loss of a step by its number. Communicates over the world."""
    total = report.loss_share.double().clone()
    if world.size > 1:
        torch.distributed.all_reduce(total)
    return {report.number: float(total)}


def trained(world, name, precision, *, saves_to=None, resumes_from=None, job=None, **changes):
    """Train; return the losses by step and, on rank 0, the final weights. Saves a checkpoint after step SAVED."""
    step = build_step(job or make_job(), plan_of(name, precision, **changes), world, resume=resumes_from)
    losses = {}
    for batch in step.feed:
        losses |= loss_of(step(batch), world)
        if saves_to is not None and step.number == SAVED:
            tensors, facts = state_of(step, {})
            write.save(saves_to, SAVED, tensors, facts, group=world.own_host_group() if world.size > 1 else None)
    return losses, sw.full_state_dict(step.model)


@functools.cache
def alone(precision):
    return run_ranks(trained, 1, "one", precision)[0]


@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp", "tp", "pp", "shard2.tp2"])
def test_bf16_moments_equal_one_process_under_every_strategy(name):
    losses, state = alone(BF16_STATES)
    found, final = run_ranks(trained, LAYOUTS[name], name, BF16_STATES)[0]
    assert found == pytest.approx(losses, rel=1e-9)
    for key, value in state.items():
        torch.testing.assert_close(final[key], value, rtol=1e-9, atol=1e-11, msg=key)
    assert losses != pytest.approx(alone(FP64)[0], rel=1e-9)  # the moments are really rounded


STRATEGIES = ("one", "ddp", "zero1", "fsdp", "tp")


@pytest.mark.representative("ddp-tp", "tp-zero1", "zero1-fsdp", "fsdp-ddp")  # each is saved and resumed once
@pytest.mark.parametrize(("saved", "resumed"), list(itertools.product(STRATEGIES, STRATEGIES)))
def test_bf16_moments_resume_exactly_elsewhere(saved, resumed, tmp_path):
    run_ranks(trained, LAYOUTS[saved], saved, BF16_STATES, saves_to=tmp_path)
    found, _ = run_ranks(trained, LAYOUTS[resumed], resumed, BF16_STATES, resumes_from=tmp_path)[0]
    expected = {number: loss for number, loss in alone(BF16_STATES)[0].items() if number >= SAVED}
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.representative("masters-ddp", "masters-fsdp", "bf16-tp", "bf16-zero1", "int8-tp", "int8-fsdp")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "precision",
    [MASTERS, WITHOUT_MASTERS, dataclasses.replace(MASTERS, optimizer="int8")],
    ids=["masters", "bf16", "int8"],
)
def test_bf16_parameters_resume_bit_for_bit(name, precision, tmp_path):
    whole, state = run_ranks(trained, LAYOUTS[name], name, precision, saves_to=tmp_path)[0]
    (checkpoint,) = tmp_path.glob("step-*")
    tensors = read_manifest(checkpoint).tensors
    assert {tensors[key].dtype for key in tensors if key.startswith("model/")} == {
        "F32" if precision.has_masters else "BF16"
    }
    then, final = run_ranks(trained, LAYOUTS[name], name, precision, resumes_from=tmp_path)[0]
    tolerance = 1e-5 if precision.optimizer == "int8" else 0.0  # scales of blocks are restored up to a rounding
    assert then == pytest.approx({number: loss for number, loss in whole.items() if number >= SAVED}, rel=tolerance)
    assert {value.dtype for value in final.values()} == {torch.bfloat16}
    for key, value in state.items():
        torch.testing.assert_close(final[key], value, rtol=tolerance and 0.01, atol=tolerance)


def test_bf16_parameters_train_close_to_fp32_ones_and_hold_half_of_the_weights():
    exact, _ = alone(Precision(compute="bf16"))
    for precision in (MASTERS, WITHOUT_MASTERS):
        found, state = alone(precision)
        assert {value.dtype for value in state.values()} == {torch.bfloat16}
        assert found == pytest.approx(exact, rel=0.03)
        assert found[STEPS - 1] < found[0]


def accumulated(world, name, split, reduce="fp32"):
    """Train with gradient accumulation; return the first gradients before the update, and the losses."""
    first, steps = {}, []

    def observe():
        if not first:
            first.update({name: value.clone() for name, value in steps[0].local_gradients().items()})

    plan = plan_of(name, dataclasses.replace(MASTERS, reduce=reduce), **split)
    steps.append(build_step(make_job(), plan, world, before_update=observe))
    losses = {}
    for batch in steps[0].feed:
        losses |= loss_of(steps[0](batch), world)
    return first, losses


@pytest.mark.parametrize("name", ["tp", "pp", "fsdp", "ddp", "zero1"])
def test_gradients_of_bf16_parameters_accumulate_in_fp32(name):
    alone, _ = run_ranks(accumulated, 1, "one", {"micro_batch": 1, "accumulation": 8})[0]
    dp_size = 2 if name in {"fsdp", "ddp", "zero1"} else 1
    found = run_ranks(accumulated, LAYOUTS[name], name, {"micro_batch": 1, "accumulation": 8 // dp_size})
    gradients, losses = found[0]
    dtype = torch.bfloat16 if name == "fsdp" else torch.float32  # FSDP2 casts the sum to the dtype of the parameter
    assert {value.dtype for value in gradients.values()} == {dtype}
    assert losses == pytest.approx(run_ranks(trained, 1, "one", MASTERS)[0][0], rel=0.03)
    if name in {"ddp", "zero1"}:  # each rank has the whole gradient: the same addends, in another order
        for key, value in gradients.items():
            torch.testing.assert_close(value, alone[key], rtol=1e-4, atol=1e-7, msg=key)
            assert torch.equal(value, found[1][0][key])


def test_the_first_step_after_a_resume_accumulates_as_the_others(tmp_path):
    precision, split = dataclasses.replace(MASTERS, reduce="fp32"), {"micro_batch": 1, "accumulation": 4}
    whole, _ = run_ranks(trained, 2, "fsdp", precision, saves_to=tmp_path, **split)[0]
    then, _ = run_ranks(trained, 2, "fsdp", precision, resumes_from=tmp_path, **split)[0]
    assert then == {number: loss for number, loss in whole.items() if number >= SAVED}


def test_ddp_reduces_fp32_sums_of_bf16_parameters_in_the_dtype_of_the_plan():
    split = {"micro_batch": 1, "accumulation": 4}
    (exact, _), (rounded, _) = (run_ranks(accumulated, 2, "ddp", split, reduce)[0] for reduce in ("fp32", "bf16"))
    for key, value in rounded.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, value.bfloat16().float())
        torch.testing.assert_close(value, exact[key], rtol=0.02, atol=1e-3)
        assert not torch.equal(value, exact[key])


@pytest.mark.parametrize("other", [FP64, Precision(compute="bf16")])
def test_checkpoint_of_masters_resumes_in_another_precision_and_back(other, tmp_path):
    if other is FP64:
        run_ranks(trained, 1, "one", BF16_STATES, saves_to=tmp_path)
        losses, _ = run_ranks(trained, 1, "one", FP64, resumes_from=tmp_path)[0]
        assert losses == pytest.approx({n: loss for n, loss in alone(FP64)[0].items() if n >= SAVED}, rel=1e-2)
        return
    run_ranks(trained, 1, "one", MASTERS, saves_to=tmp_path / "low")
    losses, state = run_ranks(trained, 1, "one", other, resumes_from=tmp_path / "low", saves_to=None)[0]
    assert {value.dtype for value in state.values()} == {torch.float32}
    run_ranks(trained, 1, "one", other, saves_to=tmp_path / "high")
    back, _ = run_ranks(trained, 1, "one", MASTERS, resumes_from=tmp_path / "high")[0]
    assert back == pytest.approx(losses, rel=0.03)


class Unusual(torch.nn.Module):
    """Has a tied and a frozen parameter, a scalar, and one without elements."""

    def __init__(self):
        super().__init__()
        self.first, self.hidden, self.tied = (torch.nn.Linear(*sizes) for sizes in ((6, 64), (64, 64), (64, 64)))
        self.last = torch.nn.Linear(64, 3)
        self.tied.weight = self.hidden.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.frozen = torch.nn.Parameter(torch.ones(64), requires_grad=False)

    def forward(self, x):
        x = torch.relu(self.first(x)) * self.scale + self.empty.sum()
        return self.last(torch.relu(self.hidden(x)) + self.tied(x) * self.frozen)


FP32_STATES = Precision(compute="bf16")
INT8_WITHOUT_MASTERS = dataclasses.replace(WITHOUT_MASTERS, optimizer="int8")


@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_unusual_parameters_resume_in_every_other_precision(name, tmp_path):
    job = points_job(Unusual, steps=STEPS)
    exact, _ = run_ranks(trained, 2, name, FP32_STATES, job=job)[0]
    order = [FP32_STATES, WITHOUT_MASTERS, MASTERS, FP32_STATES, INT8_WITHOUT_MASTERS]
    for number, (saved, resumed) in enumerate(itertools.pairwise(order)):
        folder = tmp_path / str(number)
        run_ranks(trained, 2, name, saved, job=job, saves_to=folder)
        found, state = run_ranks(trained, 2, name, resumed, job=job, resumes_from=folder)[0]
        assert found == pytest.approx({step: exact[step] for step in range(SAVED, STEPS)}, rel=0.03)
        dtype = torch.float32 if resumed is FP32_STATES else torch.bfloat16
        assert {value.dtype for value in state.values()} == {dtype}


def repeated(world, name, precision):
    """Return the losses of three steps, computed three times from a snapshot."""
    step = build_step(make_job(), plan_of(name, precision), world)
    batch = next(iter(step.feed))
    step(batch)
    restore, losses = step.snapshot(), []
    for _ in range(3):
        losses.append([float(step(batch).loss_share) for _ in range(3)])
        restore()
    return losses


@pytest.mark.parametrize("precision", [BF16_STATES, WITHOUT_MASTERS, dataclasses.replace(MASTERS, optimizer="int8")])
def test_snapshots_restore_low_precision_more_than_once(precision):
    first, *others = run_ranks(repeated, 1, "one", precision)[0]
    assert others == [first, first]


class Momentum(torch.optim.Optimizer):
    """A custom optimizer whose state is bf16 by design."""

    def __init__(self, named):
        super().__init__([parameter for _, parameter in named], {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter, dtype=torch.bfloat16))
                mean.lerp_(parameter.grad.to(torch.bfloat16), 0.1)
                parameter.add_(mean.to(parameter.dtype), alpha=-group["lr"])


def test_bf16_states_of_a_custom_optimizer_keep_their_dtype(tmp_path):
    job = make_job(optimizer=Momentum)
    whole, _ = run_ranks(trained, 1, "one", Precision(), job=job, saves_to=tmp_path)[0]
    then, _ = run_ranks(trained, 1, "one", Precision(), job=job, resumes_from=tmp_path)[0]
    assert then == {number: loss for number, loss in whole.items() if number >= SAVED}


class Clamped(Unusual):
    def forward(self, x):
        with torch.no_grad():
            self.first.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


def test_forward_that_writes_parameters_is_refused_with_masters():
    with refuses("support.forward-changes-weights", "first.weight", "masters"):
        run_ranks(trained, 1, "one", MASTERS, job=points_job(Clamped, steps=STEPS))
    run_ranks(trained, 1, "one", WITHOUT_MASTERS, job=points_job(Clamped, steps=STEPS))


def test_int8_moments_train_in_a_band_of_fp32_ones():
    exact, _ = alone(Precision())
    found, _ = run_ranks(trained, 2, "fsdp", Precision(optimizer="int8"))[0]
    assert found == pytest.approx(exact, rel=0.02)


def test_stochastic_rounding_is_right_on_average_and_keyed_by_the_global_element():
    key = torch.tensor([7, -3], dtype=torch.int32)
    whole = Counter(key, torch.tensor([[0, 0], [64, 1]]), torch.tensor(5.0))
    bits = random_bits(torch.Size((256, 64)), whole)
    part = Counter(key, torch.tensor([[100, 16], [64, 1]]), torch.tensor(5.0))
    assert torch.equal(random_bits(torch.Size((30, 40)), part), bits[100:130, 16:56])
    flat = Counter(key, torch.tensor([[100 * 64], [1]]), torch.tensor(5.0))
    assert torch.equal(random_bits(torch.Size((30 * 64,)), flat), bits[100:130].flatten())
    in_rows = Counter(key, torch.tensor([[0, 100 * 64], [16, 1]]), torch.tensor(5.0))
    assert torch.equal(random_bits(torch.Size((120, 16)), in_rows).flatten(), bits[100:130].flatten())
    later = random_bits(torch.Size((256, 64)), whole._replace(step=torch.tensor(6.0)))
    assert (later == bits).float().mean() < 1e-3
    value = 1.0 + 2**-10  # a quarter of the way between two bf16 numbers at 1.0
    rounded = round_stochastically(torch.full((256, 64), value), bits).double()
    assert set(rounded.unique().tolist()) == {1.0, 1.0078125}
    assert float(rounded.mean()) == pytest.approx(value, abs=3e-4)
    special = torch.tensor([float("inf"), -float("inf"), 0.0, -1.0])
    assert torch.equal(round_stochastically(special, torch.full((4,), -1, dtype=torch.int32)).float(), special)
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nans, torch.full((3,), -1, dtype=torch.int32)).isnan().all()


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (Plan(precision=dataclasses.replace(MASTERS, compute="fp32")), "support.precision-mix"),
        (
            Plan.preset("ddp", 2, precision=vars(MASTERS), accumulation=2, communication={"compression": "fp16"}),
            "support.bf16-accumulation",
        ),
        (Plan.preset("ddp", 2, precision={"parameter": "bf16", "compute": "bf16"}), "support.bf16-reduce"),
        (Plan(precision=MASTERS, offload=Offload(optimizer="cpu")), "support.mixed-optimizer-option"),
    ],
)
def test_precisions_that_would_lose_bits_are_refused(plan, code):
    with refuses(code):
        require_supported(plan)


def build(world, job, plan):
    build_step(job, plan, world)


@pytest.mark.parametrize("precision", [MASTERS, BF16_STATES, Precision(optimizer="int8")])
def test_custom_training_loops_refuse_precisions_of_the_optimizer(precision):
    with refuses("support.own-loop-precision"):
        check_own_loop(torch.nn.Linear(3, 1), Plan(precision=precision))


def test_bf16_parameters_need_adamw_and_no_batch_norm():
    job = make_job(optimizer=SGD(lr=0.1))
    with refuses("optimizer.precision-unsupported", "SGD"):
        run_ranks(build, 1, job, plan_of("one", BF16_STATES))


@pytest.mark.parametrize("option", [{"maximize": True}, {"amsgrad": True}, {"decoupled_weight_decay": False}])
def test_a_group_with_an_option_that_the_compiled_update_lacks_is_found(option):
    def factory(named):
        (_, first), *others = named
        groups = [{"params": [first], **option}, {"params": [parameter for _, parameter in others]}]
        return torch.optim.AdamW(groups, lr=0.1, fused=True)

    named = [*torch.nn.Linear(3, 1).named_parameters()]
    assert not is_faster_compiled(factory(named))
    with refuses("optimizer.precision-unsupported", next(iter(option))):
        mixed_optimizer(factory(named), named, BF16_STATES)


@pytest.mark.parametrize(("size", "is_faster"), [(2**11, True), (2**10, False)])
def test_large_fp32_parameters_of_a_gpu_are_updated_by_compiled_kernels(size, is_faster):
    parameter = SimpleNamespace(is_cuda=True, dtype=torch.float32, numel=lambda: size**2)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.1, fused=True)
    optimizer.param_groups[0]["params"] = [parameter]
    assert is_faster_compiled(optimizer) == is_faster
    parameter.is_cuda = False
    assert not is_faster_compiled(optimizer)


FLOAT8 = Precision(compute="float8")


def test_float8_without_torchao_names_the_extra(monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda _: None)
    with refuses("extra.float8-missing", "float8"):
        require_supported(Plan(precision=FLOAT8))


def test_a_gpu_without_float8_or_bf16_is_refused_by_its_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    device = SimpleNamespace(device=torch.device("cuda", 0), size=1, backend="nccl")
    with refuses("support.float8-device", "Tesla V100", "7.0"):
        check_precision_of(device, Plan(precision=FLOAT8))
    for precision in (MASTERS, Precision(compute="bf16"), BF16_STATES):
        with refuses("support.bf16-device", "Tesla V100", "7.0"):
            check_precision_of(device, Plan(precision=precision))
    check_precision_of(device, Plan(precision=Precision(compute="fp16", optimizer="int8")))
    check_precision_of(SimpleNamespace(device=torch.device("cpu")), Plan(precision=FLOAT8))


def on_mixed_gpus(world):
    """Check the plan on rank 0 with a new GPU and rank 1 with an old one; gloo carries the answers."""
    capability, name = ((9, 0), "H100") if world.rank == 0 else ((7, 0), "Tesla V100")
    with mock.patch.multiple(torch.cuda, get_device_capability=lambda _: capability, get_device_name=lambda _: name):
        on_gpu = dataclasses.replace(world, device=torch.device("cuda", 0))
        with refuses("support.float8-device", "Tesla V100", "7.0"):
            check_precision_of(on_gpu, Plan(precision=FLOAT8))
    return True


def test_all_ranks_refuse_a_precision_that_the_gpu_of_one_lacks():
    assert run_ranks(on_mixed_gpus, 2) == [True, True]
