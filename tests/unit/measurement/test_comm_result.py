"""What follows from a sweep's values: verdicts, fits, comparisons and pages, without any rank."""

import json
from dataclasses import replace

import msgspec
import pytest

from refusals import refuses
from shardwise.layout import Layout
from shardwise.measurement.comm.limits import Ceiling
from shardwise.measurement.comm.result import (
    Check,
    CommMeasurement,
    compare,
    csv_text,
    missing_text,
    read_earlier,
    row_of,
    table_lines,
)
from shardwise.measurement.comm.spec import TYPES, group_ranks, read_aliased, read_sizes
from shardwise.measurement.comm.verdict import findings, judge, sentence
from shardwise.measurement.report import markdown_of
from shardwise.measurement.timing import Timing

SIZES = [1 << power for power in range(10, 27, 2)]
TCP = Ceiling(link="plain TCP", shared=2e9, alone=4e9, source="measured in this run", is_measured=True)
NVLINK = Ceiling(link="nvlink4", shared=370e9, alone=370e9, source="listed", is_measured=False)


def row(size, seconds, *, collective="all_reduce", wrong=0, ranks=2, **columns):
    timing = Timing(median_s=seconds, min_s=seconds, p99_s=seconds, spread=0.01, repeats=9)
    usual = {"group": "world", "mode": "sync", "count": size // 4, "type": "float", "redop": "sum", "root": -1}
    return row_of(timing, collective=collective, size=size, ranks=ranks, wrong=wrong, **{**usual, **columns})


def line(bytes_per_s, **columns):
    return [row(size, 1e-4 + size / bytes_per_s, **columns) for size in SIZES]


def measured(rows, ceiling=TCP, checks=()):
    return CommMeasurement(
        backend="gloo",
        device="CPU",
        world_size=2,
        num_nodes=1,
        rows=tuple(rows),
        checks=tuple(checks),
        ceilings={"world": ceiling},
        left_out=(),
        seconds=1.0,
        facts=(("host", "here"),),
    )


def test_a_verdict_is_the_best_bandwidth_beside_what_the_link_carries():
    found = measured([*line(1.5e9), *line(0.5e9, collective="broadcast", redop="none", root=0)])
    good, slow = judge(found)
    assert good.text.startswith("good: 7")
    assert good.text.endswith("% of 2.00 GB/s by plain TCP")
    assert slow.text == "slow: 12% of 4.00 GB/s by plain TCP"  # one root sends alone, and TCP then carries more
    assert sentence(found, (good, slow)).startswith("18 results correct; good: all_reduce; slow: broadcast (12%)")


def test_a_listed_link_is_what_collectives_reach_and_asks_for_more():
    assert judge(measured(line(280e9), NVLINK))[0].is_good is False
    assert judge(measured([row(1 << 30, 1 / 320)], NVLINK))[0].is_good is True


def test_one_rank_small_sizes_and_unknown_links_get_no_verdict():
    assert judge(measured([row(1 << 20, 1e-3, ranks=1)], None))[0].text == "one rank: no communication"
    assert "unknown" in judge(measured(line(1e9), None))[0].text
    small = judge(measured(line(1e9)[:3]))[0]
    assert (small.share, small.is_good) == (None, None)
    assert "show latency" in small.text


def test_a_fit_finds_alpha_and_beta_of_each_series():
    first, second = judge(measured([*line(1e9), *line(2e9, mode="async")]))
    assert (first.name, second.name) == ("all_reduce", "all_reduce async")
    assert (first.fit.alpha_s, first.fit.bytes_per_s) == pytest.approx((1e-4, 1e9))
    assert second.fit.bytes_per_s == pytest.approx(2e9)
    assert first.held_out == pytest.approx(0, abs=1e-6)


def test_wrong_results_come_before_any_speed():
    check = Check(collective="reduce", operation="MAX", dtype="int8", wrong=3)
    found = measured([row(4096, 1e-3, wrong=2)], checks=[check])
    assert found.wrong == 5
    assert sentence(found, judge(found)) == (
        "wrong results: all_reduce float sum 4KiB sync in world (2), reduce MAX int8 (3)"
    )


def test_the_table_has_the_columns_of_nccl_tests_and_leaves_out_those_without_information():
    lines = table_lines([row(1 << 20, 1e-3)])
    assert " ".join(lines[0].split()) == "collective size count type redop root time min p99 algbw busbw #wrong"
    assert " ".join(lines[2].split()) == "all_reduce 1048576 262144 float sum -1 1000.0 1000.0 1000.0 1.05 1.05 0"
    assert table_lines([row(1, 1e-3, mode="async")])[0].split()[1] == "mode"
    assert (
        csv_text([row(1 << 20, 1e-3)])
        .splitlines()[1]
        .startswith("all_reduce,world,2,sync,1048576,262144,float,sum,-1,1000.0")
    )


def test_the_page_has_plots_fits_and_every_row():
    found = measured([*line(1e9), row(0, 1e-4, collective="barrier", type="none", redop="none")])
    page = markdown_of(findings(found, judge(found), []))
    assert "Fits and verdicts" in page
    assert "67108864" in page
    assert "barrier: 100 us" in page


def saved(tmp_path, rows, version=1):
    path = tmp_path / "earlier.json"
    path.write_bytes(msgspec.json.encode({"version": version, "rows": rows, "more": None}))
    return path


def test_what_is_slower_by_more_than_noise_is_a_regression(tmp_path):
    path = saved(tmp_path, line(1e9))
    earlier = read_earlier(path).rows
    assert not any(change.is_regression for change in compare(line(1e9), earlier, path))
    assert not any(change.is_regression for change in compare(line(4e9), earlier, path))
    changes = compare(line(0.5e9), earlier, path)
    slower = [change for change in changes if change.is_regression]
    assert slower[-1].text == "all_reduce 64MiB float sum sync in world: 67209 -> 134318 us (+100%)"
    noisy = [replace(found, spread=2.0) for found in line(0.5e9)]
    assert not any(change.is_regression for change in compare(noisy, earlier, path))
    disturbed = [replace(found, min_us=found.min_us / 2) for found in line(0.5e9)]
    assert not any(change.is_regression for change in compare(disturbed, earlier, path))


def test_an_earlier_file_that_is_none_is_refused(tmp_path):
    path = saved(tmp_path, [row(1024, 1e-3)])
    text = path.read_text()
    invalid, time, version = "bench.baseline-invalid", "bench.baseline-time-invalid", "bench.baseline-version"
    for bad, code in (
        (text.replace('"time_us":1000.0', '"time_us":NaN'), invalid),
        (text.replace('"time_us":1000.0', '"time_us":null'), invalid),
        (text.replace('"time_us":1000.0', '"time_us":0'), time),
        (text.replace('"min_us":1000.0', '"min_us":-1'), time),
        (text.replace('"size":1024', '"size":"1KiB"'), invalid),
        (text.replace('"version":1', '"version":7'), version),
        ("[1, 2]", invalid),
        ("{}", invalid),
        ("", invalid),
        (text[:-20], invalid),
    ):
        path.write_text(bad)
        with refuses(code, "earlier.json", "shardwise bench comm --json"):
            read_earlier(path)
    path.write_bytes(b"\xff\xfe")
    with refuses("bench.baseline-invalid", "earlier.json"):
        read_earlier(path)
    path.write_text(json.dumps(json.loads(text)))
    with refuses("bench.baseline-no-overlap"):
        compare([row(2048, 1e-3)], read_earlier(path).rows, path)


def test_what_a_backend_lacks_is_reported_in_one_line():
    def check(operation, dtype, wrong):
        return Check(collective="reduce", operation=operation, dtype=dtype, wrong=wrong)

    checks = [
        *(check("SUM", dtype, 0) for dtype in ("float32", "int8")),
        *(check("BAND", dtype, None if dtype == "float32" else 0) for dtype in ("float32", "int8")),
        *(check("PREMUL_SUM", dtype, None) for dtype in ("float32", "int8")),
    ]
    assert missing_text(checks, "gloo") == "gloo does not support PREMUL_SUM; BAND of float32"
    assert missing_text(checks[:2], "gloo") == ""


def test_sizes_are_read_as_ranges_and_lists():
    assert read_sizes("1KiB:64KiB") == (1024, 4096, 16_384, 65_536)
    assert read_sizes("1K:10K:2") == (1024, 2048, 4096, 8192)
    assert read_sizes("1MB,4KiB, 8") == (8, 4096, 1_000_000)
    for bad in ("", "-4", "4XB"):
        with refuses("bench.size-syntax", repr(bad)):
            read_sizes(bad)
    with refuses("bench.size-zero", "'0'"):
        read_sizes("0")
    with refuses("bench.sizes-factor-invalid", "1:2:3:4"):
        read_sizes("1:2:3:4")


def test_dtypes_go_by_the_names_of_torch_and_of_nccl_tests():
    assert read_aliased("float, bfloat16,HALF", TYPES, "dtype") == ("float32", "bfloat16", "float16")
    assert read_aliased("all", TYPES, "dtype") == tuple(TYPES)


def test_groups_across_nodes_join_equal_local_ranks():
    world = ((0, 0), (0, 1), (1, 0), (1, 1))
    assert group_ranks("node", world, None) == ((0, 1), (2, 3))
    assert group_ranks("across", world, None) == ((0, 2), (1, 3))
    assert group_ranks("tp", world, Layout(shard=2, tp=2)) == ((0, 1), (2, 3))
    with refuses("bench.groups-unequal"):
        group_ranks("node", world[:3], None)
