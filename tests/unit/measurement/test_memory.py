"""Bytes of live tensors: each storage once, from its making to its end."""

import gc
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwise as sw
from jobs import Tokens, train_split
from shardwise.measurement.memory import LiveBytes
from shardwise.models import DecoderConfig
from shardwise.plans import Plan
from shardwise.testing import fake_world

TINY = DecoderConfig(
    family="llama", width=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=64, vocab_size=101, context=16
)


def make_job(ranks):
    return sw.Job(
        model=lambda: sw.models.decoder(TINY),
        data=train_split(Tokens(1024, 16, TINY.vocab_size)),
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=2 * ranks,
        steps=3,
    )


def test_known_tensors_add_up():
    with LiveBytes("cpu") as live:
        kept = [torch.zeros(100), torch.zeros(50, dtype=torch.float64)]
    assert live.current_bytes == live.peak_bytes == 800
    assert sum(allocation.num_bytes for allocation in live.at_peak()) == 800
    assert len(kept) == 2


def test_a_freed_storage_leaves_the_peak_behind():
    with LiveBytes("cpu") as live:
        first = torch.zeros(1000)
        del first
        second = torch.zeros(10)
        assert live.current_bytes == 40
        assert live.peak_bytes == 4000
        assert [(allocation.num_bytes, allocation.shape) for allocation in live.at_peak()] == [(4000, (1000,))]
        live.reset_peak()
        assert live.peak_bytes == 40
        assert [allocation.num_bytes for allocation in live.at_peak()] == [40]
    assert second.numel() == 10


def test_views_are_counted_once_and_hold_their_storage():
    with LiveBytes("cpu") as live:
        whole = torch.zeros(64)
        part = whole.view(8, 8)[2]
        del whole
        assert live.current_bytes == 256
        del part
        assert live.current_bytes == 0


def test_what_was_there_before_is_counted_when_it_is_read():
    before = torch.ones(16)
    with LiveBytes("cpu") as live:
        after = before + 1
    assert live.current_bytes == 128
    assert {allocation.operator for allocation in live.at_peak()} == {"outside", "aten.add.Tensor"}
    assert after.sum() == 32


def test_a_resized_storage_changes_its_bytes():
    with LiveBytes("cpu") as live:
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(0)
        assert live.current_bytes == 0
        tensor.untyped_storage().resize_(800)
        assert live.current_bytes == live.peak_bytes == 800
    assert tensor.untyped_storage().nbytes() == 800


def test_other_devices_are_not_counted():
    with LiveBytes("cpu") as live:
        elsewhere = torch.zeros(100, device="meta")
    assert live.peak_bytes == 0
    with LiveBytes("meta") as live:
        there = elsewhere + 1
    assert live.current_bytes == 800
    assert there.is_meta


def test_fake_tensors_lie_on_meta():
    with FakeTensorMode(), LiveBytes("cpu") as here, LiveBytes("meta") as there:
        fake = torch.zeros(100)
    assert fake.device.type == "cpu"
    assert (here.peak_bytes, there.current_bytes) == (0, 400)


def test_gradients_and_fused_and_foreach_states_are_counted():
    for options in ({"fused": True}, {"foreach": True}):
        model = torch.nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        with LiveBytes("cpu") as live:
            live.watch("parameters", model.parameters())
            assert live.current_bytes == 64 * 64 * 4
            model(torch.ones(1, 64)).sum().backward()
            assert live.current_bytes == 2 * 64 * 64 * 4
            optimizer.step()
            assert live.current_bytes == pytest.approx(4 * 64 * 64 * 4, abs=16)


def test_the_peak_names_operator_module_and_phase():
    model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    with LiveBytes("cpu") as live:
        model(torch.ones(64, 8)).sum().backward()
    found = {
        (allocation.operator, allocation.module, allocation.phase, allocation.shape) for allocation in live.at_peak()
    }
    assert ("aten.relu.default", "1", "forward", (64, 512)) in found
    assert ("aten.mm.default", "2", "backward", (64, 512)) in found


def run_steps(name, ranks, on_step=lambda _: None):
    with fake_world(ranks) as world:
        step = sw.build_step(make_job(ranks), Plan.preset(name, ranks, batch_size=2 * ranks), world)
        for batch in step.feed:
            on_step(step(batch))
    return step


@pytest.fixture
def without_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("ddp", 1 + 1 + 2),  # parameters, DDP's buckets (gradients are views of them), AdamW's states
        ("zero1", 1 + 1 + 2 / 4),
        ("zero3", 1 / 4 + 2 / 4),
    ],
)
def test_a_step_of_a_fake_world_holds_its_share_of_states(name, shares):
    with LiveBytes("cpu") as live:
        step = run_steps(name, 4)
        parameters = sum(parameter.numel() for _, parameter in step.named_parameters()) * 4
        assert live.current_bytes / parameters == pytest.approx(shares, abs=0.03)  # shards are padded, counters exist
        assert live.peak_bytes > live.current_bytes + parameters / 4


def test_the_peak_of_a_sharded_step_is_the_allocators_own(without_gc):
    with LiveBytes("cpu") as live:
        run_steps("zero3", 4)
    gc.collect()  # what the first left in cycles must not end during the second
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run_steps("zero3", 4)
    kineto = profile.profiler.kineto_results.events()
    changes = [event for event in kineto if event.name() == "[memory]"]
    running = itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    assert live.peak_bytes == pytest.approx(max(running), rel=0.02)
