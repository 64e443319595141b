"""Results are checked on every rank: right ones pass in every operation and dtype, and a wrong one never does."""

import pytest
import torch
import torch.distributed as dist

from refusals import refuses
from shardwise.measurement.comm.check import check_all, count_wrong, inputs, reduced, refuse_missing, tolerance
from shardwise.measurement.comm.collectives import CollectiveSpec, prepare
from shardwise.measurement.comm.result import missing_text
from shardwise.measurement.comm.spec import KINDS, OPERATIONS, TYPES, SweepSettings
from shardwise.testing import run_ranks

CPU = torch.device("cpu")
DTYPES = {name: getattr(torch, name) for name in TYPES}
WHOLE = [name for name, dtype in DTYPES.items() if not dtype.is_floating_point]
REAL = ["float64", "float32", "float16", "bfloat16"]


def check_everything(world):
    return check_all(SweepSettings(), world, world.store)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_operation_and_dtype_is_right(ranks):
    for checks in run_ranks(check_everything, ranks):
        found = {check.case: check.wrong for check in checks}
        assert {wrong for wrong in found.values() if wrong is not None} == {0}
        assert all(found[name, "", dtype] == 0 for name in ("broadcast", "all_gather") for dtype in REAL + WHOLE)
        reducing = [name for name, kind in KINDS.items() if kind.reduces]
        for name in reducing:
            assert all(found[name, op, dtype] == 0 for op in ("SUM", "MIN", "MAX", "PRODUCT") for dtype in REAL + WHOLE)
            assert all(found[name, op, dtype] == 0 for op in ("BAND", "BOR", "BXOR") for dtype in WHOLE)
            assert found[name, "PREMUL_SUM", "float32"] is None
            assert found[name, "BAND", "float32"] is None
    assert missing_text(checks, "gloo").startswith("gloo does not support PREMUL_SUM; float8_e4m3fn; float8_e5m2")
    with refuses("bench.backend-unsupported", "gloo", "BAND", "float32", "--dtypes with int8, uint8, int32, int64"):
        refuse_missing(SweepSettings(operations=("BAND",), named=("BAND",)), checks, "gloo")
    refuse_missing(SweepSettings(operations=("BAND",)), checks, "gloo")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64, 130])
def test_inputs_differ_by_rank_and_element_and_results_are_exact_in_every_dtype(ranks):
    for dtype in DTYPES.values():
        for operation in [None, *OPERATIONS]:
            if operation in {"BAND", "BOR", "BXOR"} and dtype.is_floating_point:
                continue
            values = inputs(ranks, operation, dtype)[:4]
            assert torch.equal(values.to(dtype).to(torch.int64), values)
            assert all(len(row.unique()) > 1 or operation == "AVG" for row in values)
            if ranks > 1:
                assert not torch.equal(values[0], values[1])
            if operation is not None:
                result = reduced(ranks, operation, dtype)
                assert torch.equal(result.to(dtype).to(result.dtype), result)


def test_a_mean_is_exact_but_where_ranks_are_no_power_of_two():
    assert tolerance(4, "AVG", torch.bfloat16) == tolerance(3, "SUM", torch.bfloat16) == 0
    assert tolerance(3, "AVG", torch.int32) == 0
    assert 0 < tolerance(3, "AVG", torch.float32) < 1e-6
    assert torch.equal(reduced(3, "AVG", torch.int8) % 1, torch.zeros(251, dtype=torch.float64))


NAMES = {
    "all_gather": "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}


def with_one_wrong_element(world, name):
    """Call each collective through a function that spoils the last element that rank 0 received."""
    patched = NAMES.get(name, name)
    real = getattr(dist, patched)

    def spoil(*args, **kwargs):
        work = real(*args, **kwargs)
        if world.rank == 0:
            target = args[1][-1] if name == "gather" else args[0]
            target[-1] += 1
        return work

    setattr(dist, patched, spoil)
    try:
        found = prepare(CollectiveSpec(name=name, num_bytes=4096), dist.group.WORLD, CPU)
        return count_wrong(found, world.store, name)
    finally:
        setattr(dist, patched, real)


def with_nothing_done(world, name):
    patched = NAMES.get(name, name)
    real = getattr(dist, patched)
    setattr(dist, patched, lambda *args, **kwargs: None)
    try:
        found = prepare(CollectiveSpec(name=name, num_bytes=4096), dist.group.WORLD, CPU)
        return count_wrong(found, world.store, f"{name} not done")
    finally:
        setattr(dist, patched, real)


def spoil_all(world):
    moving = [name for name, kind in KINDS.items() if kind.traffic != "none"]
    return {name: with_one_wrong_element(world, name) for name in moving}, {
        name: with_nothing_done(world, name) for name in KINDS
    }


def test_one_wrong_element_of_any_collective_is_counted_and_so_is_a_call_that_does_nothing(monkeypatch):
    monkeypatch.setattr("shardwise.measurement.comm.check._LATE_S", 1.0)  # later than a rank of a busy machine
    (first, first_idle), (second, second_idle) = run_ranks(spoil_all, 2)
    assert first == dict.fromkeys(first, 1)
    assert second == dict.fromkeys(second, 0)
    assert all(first_idle[name] + second_idle[name] > 0 for name in KINDS)
    assert first_idle["barrier"] == 1  # it left before the late rank came
    assert second_idle["broadcast"] > 900


def swapped_parts(world):
    real = dist.all_to_all_single

    def swap(received, sent, **how):
        work = real(received, sent, **how)
        received.copy_(received.view(2, -1).flip(0).flatten())
        return work

    dist.all_to_all_single = swap
    found = prepare(CollectiveSpec(name="all_to_all", num_bytes=1 << 16, dtype=torch.int8), dist.group.WORLD, CPU)
    return count_wrong(found, world.store, "swapped")


def test_parts_in_the_wrong_order_are_wrong_though_every_value_is_there():
    assert all(wrong > 60_000 for wrong in run_ranks(swapped_parts, 2))
