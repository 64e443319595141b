"""The number of devices for a batch that does not divide over all of them, and what to change if no plan fits."""

import itertools
import shlex
import time

import pytest

import shardwise as sw
from shardwise.hardware.cluster import parse_cluster
from shardwise.planner.search.search import FAMILY_TIE, STRUCTURE_TIE

TIES = (1 + STRUCTURE_TIE) * (1 + FAMILY_TIE)
"""How much slower than the fastest a simpler plan may be."""


@pytest.mark.parametrize(
    ("model", "device", "batch_size", "sizes"),
    [
        ("gpt2-xl", "H100", 97, (1, 5, 8, 24, 64, 256)),
        ("llama-7b", "H100", 97, (2, 8, 64, 136, 512)),
        ("resnet-50", "MI300X", 7, (1, 2, 4, 6, 8, 16)),
        ("gpt2", "V100-32GB", 13, (1, 2, 6, 8, 16)),
        ("gpt2", "A100-80GB", 91, (4, 8, 16, 64)),
        ("llama3-8b", "H100", 500, (8, 40, 48, 256)),
    ],
)
def test_more_devices_are_never_slower_for_a_batch_that_does_not_divide(model, device, batch_size, sizes):
    reports = [sw.plan(model, cluster=f"{size}x{device}", batch_size=batch_size, history=False) for size in sizes]
    seconds = [report.answer.best.time.seconds for report in reports]
    for (size, report), least in zip(
        zip(sizes[1:], reports[1:], strict=True), itertools.accumulate(seconds, min), strict=False
    ):
        if batch_size % size:
            assert report.answer.best.time.seconds <= TIES * least, size
        assert report.best.layout.world_size + report.answer.num_idle == size


def test_a_batch_that_does_not_divide_uses_the_fastest_number_of_devices_and_names_a_better_batch():
    report = sw.plan("gpt2-xl", cluster="64xH100", batch_size=97)
    most = sw.plan("gpt2-xl", cluster="64xH100", batch_size=97, max_gpus=64)
    assert report.best.layout.world_size == most.best.layout.world_size == 24
    (hint,) = report.hints
    assert hint.batch_size == 96
    assert hint.throughput_ratio > 3
    other = sw.plan("gpt2-xl", cluster="64xH100", batch_size=96).answer.best
    assert (other.plan.layout.world_size, other.time.seconds) == (hint.num_devices, hint.step_s)


def test_a_small_model_is_not_split_because_of_its_batch_but_the_split_is_named():
    report = sw.plan("gpt2", cluster="8xV100-32GB", batch_size=13)
    assert str(report.best.layout) == "one"
    batch, split = report.hints
    assert (batch.batch_size, batch.num_devices) == (16, 8)
    assert (split.batch_size, split.num_devices) == (13, 6)
    assert 1 < split.throughput_ratio <= 2.5
    assert "splitting the model by tp6" in split.text


@pytest.mark.parametrize(
    ("model", "cluster", "batch_size", "options"),
    [
        ("t5-11b", "1xH100", 7, "--cluster 8xH100"),
        ("t5-11b", "1xH100", 1, "--cluster 2xH100 --batch-size 2"),
        ("t5-11b", "512xH100", 97, "--batch-size 96"),
        ("t5-11b", "8xA100-40GB", 1, "--batch-size 8"),
        ("llama-70b", "8xH100", 13, "--batch-size 16"),
        ("llama-70b", "1xH100", 7, "--cluster 8xH100"),
        ("llama3-405b", "8xH100", 64, "--cluster "),
    ],
)
def test_the_advice_where_nothing_fits_is_the_smallest_change_that_does(model, cluster, batch_size, options):
    report = sw.plan(model, cluster=cluster, batch_size=batch_size)
    assert report.best is None
    change = report.advice.partition(": use ")[2].partition(",")[0]
    assert change.startswith(options)
    argv = shlex.split(change)
    changed = {argv[n].strip("-").replace("-", "_"): argv[n + 1] for n in range(0, len(argv), 2)}
    batch = int(changed.get("batch_size", batch_size))
    assert sw.plan(model, cluster=changed.get("cluster", cluster), batch_size=batch).best is not None


@pytest.mark.parametrize("batch_size", [2000, 2047, 2048])
def test_16384_devices_are_searched_in_seconds_also_if_the_batch_does_not_divide(batch_size):
    began = time.process_time()
    report = sw.plan("llama3-405b", cluster="16384xH100", batch_size=batch_size, history=False)
    assert time.process_time() - began < 4  # 0.5 to 1.4 s on an idle core
    assert report.best.layout.world_size > 0.9 * parse_cluster("16384xH100").num_devices
