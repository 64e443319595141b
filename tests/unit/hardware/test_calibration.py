"""What a calibration predicts between and beyond its measurements, and how it is kept."""

from dataclasses import replace

import pytest

from refusals import refuses
from shardwise.hardware.calibration import (
    AttentionPoint,
    CollectivePoints,
    MatmulPoint,
    calibration_for,
    calibration_path,
    default_calibration,
    measured,
    read_calibration,
    write_calibration,
)
from shardwise.hardware.cluster import parse_cluster

NODE = parse_cluster("8xH200").node
LISTED = default_calibration(NODE)


@pytest.mark.parametrize(
    ("shape", "teraflops"),
    [((8192, 8192, 8192), 785), ((16384, 8192, 2048), 760), ((32768, 3072, 768), 610), ((16384, 128256, 2048), 676)],
)
def test_catalogue_rates_are_near_what_one_h200_was_measured_to_do(shape, teraflops):
    assert LISTED.matmul(*shape, "bf16").value / 1e12 == pytest.approx(teraflops, rel=0.1)


@pytest.mark.parametrize(
    ("length", "head_dim", "teraflops"), [(2048, 128, 391), (4096, 128, 473), (8192, 128, 532), (1024, 64, 230)]
)
def test_catalogue_attention_is_near_what_one_h200_was_measured_to_do(length, head_dim, teraflops):
    forward = LISTED.attention(length, head_dim, "bf16").value
    backward = LISTED.attention(length, head_dim, "bf16", backward=True).value
    assert 14 / (4 / forward + 10 / backward) / 1e12 == pytest.approx(teraflops, rel=0.1)


def test_a_vector_product_is_bound_by_memory():
    rate = LISTED.matmul(1, 4096, 4096, "bf16").value
    assert rate == pytest.approx(LISTED.memory_bandwidth.value, rel=0.01)  # one FLOP per byte


def test_defaults_name_the_catalogue_as_their_source():
    assert LISTED.memory_bandwidth.origin == LISTED.matmul(512, 512, 512, "bf16").origin == "catalogue"


def test_measured_point_is_given_back_and_sure():
    point = MatmulPoint(m=4096, n=4096, k=4096, dtype="bf16", flops=500e12)
    figure = replace(LISTED, matmuls=(point,)).matmul(4096, 4096, 4096, "bf16")
    assert figure.value == pytest.approx(500e12)
    assert (figure.origin, figure.uncertainty) == ("measured", pytest.approx(0.04))


def test_uncertainty_grows_with_the_distance_from_what_was_measured():
    point = MatmulPoint(m=4096, n=4096, k=4096, dtype="bf16", flops=500e12)
    known = replace(LISTED, matmuls=(point,))
    assert known.matmul(8192, 4096, 4096, "bf16").uncertainty < known.matmul(8192, 8192, 8192, "bf16").uncertainty


def test_near_point_counts_more_than_a_far_one():
    near = MatmulPoint(m=4096, n=4096, k=4096, dtype="bf16", flops=400e12)
    far = MatmulPoint(m=64, n=64, k=64, dtype="bf16", flops=0.02e12)
    rate = replace(LISTED, matmuls=(near, far)).matmul(4096, 4096, 2048, "bf16").value
    alone = replace(LISTED, matmuls=(near,)).matmul(4096, 4096, 2048, "bf16").value
    assert rate == pytest.approx(alone, rel=0.05)


def test_small_products_that_beat_the_catalogue_do_not_lift_large_ones():
    sizes = (64, 128, 512, 2048)
    points = tuple(
        MatmulPoint(m=m, n=n, k=k, dtype="fp32", flops=95e9) for m in sizes for n in sizes for k in sizes
    )  # a device that reaches the same rate on every shape
    known = replace(default_calibration(parse_cluster("cpu").node), matmuls=points)
    for shape in ((1024, 768, 256), (1024, 1024, 256), (256, 768, 1024)):
        assert known.matmul(*shape, "fp32").value == pytest.approx(95e9, rel=0.3)


def test_measurements_of_another_dtype_do_not_count():
    point = MatmulPoint(m=4096, n=4096, k=4096, dtype="fp32", flops=1e12)
    assert replace(LISTED, matmuls=(point,)).matmul(4096, 4096, 4096, "bf16").origin == "catalogue"


def test_attention_is_measured_apart_for_both_directions():
    point = AttentionPoint(length=2048, head_dim=128, dtype="bf16", forward=300e12, backward=200e12)
    known = replace(LISTED, attentions=(point,))
    assert known.attention(2048, 128, "bf16").value == pytest.approx(300e12)
    assert known.attention(2048, 128, "bf16", backward=True).value == pytest.approx(200e12)


@pytest.mark.parametrize(("size", "seconds"), [(1, 1.0), (1000, 1.0), (1500, 1.25), (2000, 1.5), (4000, 2.5)])
def test_seconds_of_a_collective_are_linear_between_and_beyond_points(size, seconds):
    points = CollectivePoints(name="all_reduce", ranks=2, nodes=1, points=((1000, 1.0), (2000, 1.5)))
    assert points.seconds(size) == pytest.approx(seconds)


def test_collective_is_found_by_its_group_only():
    points = CollectivePoints(name="all_reduce", ranks=2, nodes=1, points=((1000, 1.0),))
    known = replace(LISTED, collectives=(points,))
    assert known.collective("all_reduce", 2, 1) is points
    assert known.collective("all_reduce", 4, 1) is None
    assert known.collective("all_gather", 2, 1) is None


def test_written_calibration_is_read_back_equal(tmp_path):
    point = MatmulPoint(m=1, n=2, k=3, dtype="bf16", flops=4.0)
    points = CollectivePoints(name="send", ranks=2, nodes=1, points=((8, 1e-5), (16, 2e-5)))
    known = replace(LISTED, matmuls=(point,), collectives=(points,), operator_s=measured(5e-6), machine="here")
    assert write_calibration(known, tmp_path) == calibration_path(NODE.device, tmp_path)
    assert read_calibration(NODE.device, tmp_path) == known
    assert calibration_for(NODE, tmp_path) == known


def test_without_a_file_the_catalogue_speaks(tmp_path):
    assert read_calibration(NODE.device, tmp_path) is None
    assert calibration_for(NODE, tmp_path) == LISTED


def test_it_is_kept_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert write_calibration(LISTED) == tmp_path / "shardwise" / "calibration" / "h200.json"


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1}', "\x00"])
def test_damaged_file_is_refused_by_name(tmp_path, text):
    calibration_path(NODE.device, tmp_path).write_text(text)
    with refuses("hardware.calibration-read-failed", "h200.json"):
        read_calibration(NODE.device, tmp_path)


def test_file_of_another_version_is_refused(tmp_path):
    write_calibration(replace(LISTED, version=99), tmp_path)
    with refuses("hardware.calibration-version", 99):
        read_calibration(NODE.device, tmp_path)


def test_products_with_rows_off_16_bytes_are_as_slow_as_their_like():
    even = MatmulPoint(m=8192, n=50_304, k=768, dtype="bf16", flops=600e12)
    odd = MatmulPoint(m=8192, n=50_257, k=768, dtype="bf16", flops=150e12)
    known = replace(LISTED, matmuls=(even, odd))
    assert (even.aligned, odd.aligned) == (True, False)
    assert known.matmul(8192, 50_257, 768, "bf16", aligned=False).value == pytest.approx(150e12, rel=0.01)
    assert known.matmul(8192, 50_257, 768, "bf16").value == pytest.approx(600e12, rel=0.01)
    alone = replace(LISTED, matmuls=(even,))
    assert alone.matmul(8192, 50_257, 768, "bf16", aligned=False).value == pytest.approx(600e12, rel=0.01)
