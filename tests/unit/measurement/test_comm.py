"""The sweep on real ranks: requested collectives are timed and checked, and the command prints the results."""

import contextlib
import csv
import io
import json

import msgspec
import pytest
import torch.distributed as dist

from refusals import assert_refused, refuses
from shardwise.cli.main import main
from shardwise.layout import Layout
from shardwise.measurement.comm.check import _cases
from shardwise.measurement.comm.report import sweep
from shardwise.measurement.comm.result import read_earlier
from shardwise.measurement.comm.spec import SweepSettings
from shardwise.testing import run_ranks

LITTLE = {"checked_dtypes": (), "checked_operations": (), "budget_s": 0.2}


def test_every_asked_combination_is_a_row_and_all_ranks_agree_on_it():
    spec = SweepSettings(
        collectives=("all_reduce", "gather", "barrier"),
        sizes=(1024, 4096),
        dtypes=("float32", "int32"),
        operations=("SUM", "MAX"),
        root=1,
        modes=("sync", "async"),
        **LITTLE,
    )
    first, second = run_ranks(sweep, 2, spec)
    assert first.rows == second.rows
    assert first.wrong == 0
    assert not first.left_out
    found = {(row.collective, row.size, row.type, row.redop, row.mode, row.root) for row in first.rows}
    sizes, modes, types = (1024, 4096), ("sync", "async"), ("float", "int32")
    assert found == {
        *(("all_reduce", s, t, op, m, -1) for s in sizes for t in types for op in ("sum", "max") for m in modes),
        *(("gather", s, t, "none", m, 1) for s in sizes for t in types for m in modes),
        *(("barrier", 0, "none", "none", m, -1) for m in modes),
    }
    assert len(found) == len(first.rows)
    assert all(0 < row.min_us <= row.time_us <= row.p99_us and row.repeats >= 3 for row in first.rows)
    assert first.ceilings["world"].shared > 0
    assert first.ceilings["world"].is_measured


def test_groups_are_those_of_the_world_the_node_and_an_axis():
    spec = SweepSettings(
        collectives=("all_reduce", "broadcast"),
        sizes=(1024,),
        groups=("world", "node", "tp"),
        layout=Layout(shard=2, tp=2),
        **LITTLE,
    )
    found = run_ranks(sweep, 4, spec)[0]
    assert {(row.group, row.ranks) for row in found.rows} == {("world", 4), ("node", 4), ("tp", 2)}
    assert found.wrong == 0


def test_one_rank_has_rows_and_no_verdict_on_links():
    found = run_ranks(sweep, 1, SweepSettings(sizes=(1024,), **LITTLE))[0]
    assert found.ceilings == {"world": None}
    assert found.wrong == 0


def refused(world, spec, *refusal):
    with refuses(*refusal):
        sweep(world, spec)


def test_sizes_over_the_memory_and_a_root_outside_are_refused_by_ranks_before_they_allocate():
    settings = SweepSettings(sizes=(1 << 50,))
    run_ranks(refused, 1, settings, "bench.not-enough-memory", "1048576GiB", "2097152.0 GiB", "free")
    run_ranks(refused, 1, SweepSettings(root=1), "bench.root-out-of-range", "--root 1", "0 to 0")


def test_measurements_beyond_the_time_budget_are_left_out_and_named():
    spec = SweepSettings(collectives=("all_reduce",), sizes=(1 << 10, 1 << 26), **{**LITTLE, "budget_s": 1e-4})
    found = run_ranks(sweep, 2, spec)[0]
    assert [row.size for row in found.rows] == [1 << 10]
    assert len(found.left_out) == 1
    assert found.left_out[0].startswith("all_reduce of 64MiB in world")


def command(world, *arguments, spoiled=False):
    """Run the command line as one rank of a world that is already there."""
    real = dist.all_reduce

    def spoil(tensor, *args, **kwargs):
        work = real(tensor, *args, **kwargs)
        if world.rank == 1 and tensor.numel() == 1024:
            tensor[5] += 1
        return work

    if spoiled:
        dist.all_reduce = spoil
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["bench", "comm", "all_reduce", "barrier", "--sizes", "4KiB,16KiB", "--seconds", "0.2", *arguments])
    dist.all_reduce = real
    return code, out.getvalue()


def test_the_command_writes_table_json_csv_report_and_compares(tmp_path):
    def in_turn(world):
        written = command(world, "--csv", str(tmp_path / "a.csv"), "--report", str(tmp_path / "a.html"))
        code, text = command(world, "--json", "--dtypes", "float")
        if world.rank == 0:
            (tmp_path / "same.json").write_text(text)
            document = json.loads(text)
            for row in document["rows"]:
                row["time_us"], row["min_us"], row["spread"] = row["time_us"] / 1e6, row["min_us"] / 1e6, 0.0
            (tmp_path / "faster.json").write_text(json.dumps(document))
        world.barrier()
        slower = command(world, "--compare", str(tmp_path / "faster.json"))
        return written, (code, text), slower

    (table, as_json, slower), others = run_ranks(in_turn, 2)
    assert others == ((0, ""),) * 3
    assert table[0] == as_json[0] == 0
    assert "collective" in table[1]
    assert "#wrong" in table[1]
    assert "gloo does not support PREMUL_SUM" in table[1]
    assert "results correct" in table[1].splitlines()[-1]
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [
        (row["collective"], row["size_bytes"], row["count"], row["type"], row["redop"], row["root"]) for row in rows
    ] == [
        ("all_reduce", "4096", "1024", "float", "sum", "-1"),
        ("barrier", "0", "0", "none", "none", "-1"),
        ("all_reduce", "16384", "4096", "float", "sum", "-1"),
    ]
    assert "<svg" in (tmp_path / "a.html").read_text()
    document = msgspec.json.decode(as_json[1])
    assert {"version", "backend", "rows", "checks", "ceilings", "verdicts", "facts"} <= document.keys()
    assert read_earlier(tmp_path / "same.json").rows[0].collective == "all_reduce"
    assert slower[0] == 3
    assert "slower than in the earlier run: all_reduce 4KiB float sum sync in world" in slower[1]


def test_a_wrong_result_is_counted_named_and_makes_exit_code_three():
    (code, text), _ = run_ranks(command, 2, spoiled=True)
    assert code == 3
    assert "wrong results: all_reduce float sum 4KiB sync in world (1)" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["allreduce"], ("bench.unknown-choice", "'allreduce'", "'all_reduce'")),
        (["--sizes", "1PB"], ("bench.size-syntax", "'1PB'", "64KiB")),
        (["--sizes", "1TiB:4TiB"], ("bench.not-enough-memory", "this host has")),
        (["--sizes", "8:4"], ("bench.sizes-descending", "8:4", "4:8")),
        (["--sizes", "1:8:1"], ("bench.sizes-factor-invalid", "1:8:1")),
        (["--dtypes", "flot32"], ("bench.unknown-choice", "dtype 'flot32'", "'float32'")),
        (["--ops", "SUMM"], ("bench.unknown-choice", "reduce operation 'SUMM'", "'SUM'")),
        (["--group", "nodes"], ("bench.unknown-choice", "group 'nodes'", "'node'")),
        (["--group", "tp"], ("bench.group-without-layout", "--group tp", "tp2")),
        (
            ["--group", "tp", "--layout", "shard2"],
            ("bench.group-axis-unsplit", "shard2", "tp", "world, node, across, shard"),
        ),
        (["--group", "tp", "--layout", "tp4", "--nproc", "2"], ("layout.world-size-mismatch", "tp4", 4, 2)),
        (["--group", "across"], ("bench.group-one-node", "--group across")),
        (["--root", "7", "--nproc", "2"], ("bench.root-out-of-range", "--root 7", 2)),
        (["--csv", "/nowhere/a.csv"], ("cli.output-not-writable", "/nowhere/a.csv")),
        (["--report", "a.pdf"], ("bench.report-extension", "a.pdf")),
        (["--compare", "/nowhere/a.json"], ("bench.baseline-read-failed", "/nowhere/a.json", "No such file")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence_and_exit_code_two(arguments, refusal, capsys):
    assert main(["bench", "comm", "--device", "cpu", *arguments]) == 2
    shown = capsys.readouterr().err
    assert_refused(shown, *refusal)
    assert shown.count("\n") == 1


def test_the_barrier_is_used_before_operations_that_may_be_refused():
    """gloo's barrier can raise the error of an operation refused just before, on one rank alone."""
    names = [name for name, _, _ in _cases(SweepSettings(collectives=("all_reduce", "barrier", "reduce")))]
    assert names[0] == "barrier"
    assert set(names) == {"all_reduce", "barrier", "reduce"}
