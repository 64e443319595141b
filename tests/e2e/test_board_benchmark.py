"""The board of training speed: its command on a CPU, its ratios, and its table in the documentation."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def board_table(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import board_table

    return board_table


def test_ratios_are_to_both_measurements_of_the_reference_of_the_same_command(board_table, tmp_path, capsys):
    blank = board_table.Record(
        run="1",
        device="GPU",
        torch="2",
        matmul_flops=1e15,
        shape="llama-1.2b",
        contender="hand-written",
        num_parameters=10,
        rows=2,
        context=5,
        flops=1e14,
    )

    def record(contender, rates, **more):
        return dataclasses.replace(blank, contender=contender, rates=rates, losses=(2.0, 1.0), peak_bytes=2**30, **more)

    records = [
        record("hand-written", (1.0, 1.0), cold_s=9.0),
        record("float8", (3.0, 3.0), note="a note"),
        record("torchao-by-hand", (2.0,)),
        dataclasses.replace(blank, contender="fabric", error="OutOfMemoryError: too large"),
        record("hand-written", (2.0, 2.0), warm_s=3.0),
    ]
    rows = board_table.rows_of(records)
    assert [(row.record.contender, row.ratio, row.drift) for row in rows] == [
        ("hand-written", 1.0, 1.0),
        ("float8", 2.0, None),
        ("torchao-by-hand", pytest.approx(4 / 3), None),
    ]
    assert (rows[0].cold_s, rows[0].warm_s, rows[1].tokens_per_s, rows[1].share) == (9.0, 3.0, 30.0, pytest.approx(0.3))
    board_table.show("llama-1.2b", rows)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("FIGURE")] == [
        "FIGURE board.llama-1.2b.float8 2 x-hand-written target >=1.25 met",
        "FIGURE board.llama-1.2b.float8.memory 1 x-hand-written target <=1 met",
        "FIGURE board.llama-1.2b.float8.torchao 1.5 x-torchao-by-hand target >=1 met",
    ]

    later = [dataclasses.replace(each, run="2") for each in (record("hand-written", (4.0,)), record("float8", (4.0,)))]
    file, page = tmp_path / "board.json", tmp_path / "board.md"
    for each in (*records, *later):
        board_table.append(file, each)
    page.write_text(board_table.PAGE.read_text())
    board_table.write_page(board_table.read([file]), page)
    text = page.read_text()
    assert "| llama-1.2b | float8 | 40 | 1.000 | 400 | 40.0% | 1.0 | 1.0000 | - / - |" in text
    assert "| llama-1.2b | torchao-by-hand | 20 | 1.333 |" in text
    assert "| width-4096 | float8 |" in text  # a shape that no record has
    assert "- llama-1.2b, fabric: failed, OutOfMemoryError: too large" in text
    before, after = (board_table.PAGE.read_text().split(mark) for mark in (board_table.START, board_table.END))
    assert text.startswith(before[0])
    assert text.endswith(after[1])


def test_a_row_of_the_page_is_replaced_by_one_of_the_same_shape_and_contender_only(board_table, tmp_path):
    page = tmp_path / "board.md"
    old = "GPU, torch 1, bf16 matrix products at 500 TFLOP/s.\n\n| shape | contender | tokens/s |\n|---|---|---|\n"
    old += "| a | hand-written | 10 |\n| a | float8 | 20 |\n| b | hand-written | 30 |\n\n"
    old += "- a, float8: an old note\n- a, fabric: failed, OutOfMemoryError\n- b, float8: failed, ValueError: x, y\n"
    page.write_text(f"before\n{board_table.START}{old}{board_table.END}after\n")
    record = board_table.Record(
        run="1",
        device="GPU",
        torch="2",
        matmul_flops=1e15,
        shape="a",
        contender="float8",
        num_parameters=10,
        rows=2,
        context=5,
        flops=1e14,
        rates=(4.0,),
        losses=(1.0,),
    )
    fabric = dataclasses.replace(record, contender="fabric", note="now it fits")
    board_table.write_page([record, fabric], page)
    lines = page.read_text().splitlines()
    rows = [line.split(" | ")[:3] for line in lines if line.startswith("| ")]
    assert rows[1:] == [
        ["| a", "hand-written", "10 |"],
        ["| a", "float8", "40"],
        ["| a", "fabric", "40"],
        ["| b", "hand-written", "30 |"],
    ]
    assert [line for line in lines if line.startswith("GPU")] == [
        "GPU, torch 1, bf16 matrix products at 500 TFLOP/s.",
        "GPU, torch 2, bf16 matrix products at 1000 TFLOP/s.",
    ]
    assert [line for line in lines if line.startswith("- ")] == [
        "- b, float8: failed, ValueError: x, y",
        "- a, fabric: now it fits",
    ]
    assert (lines[0], lines[-1]) == ("before", "after")
    for rate in (8.8e14, 9e14):
        board_table.write_page([dataclasses.replace(record, matmul_flops=rate)], page)
    assert [line for line in page.read_text().splitlines() if line.startswith("GPU, torch 2")] == [
        "GPU, torch 2, bf16 matrix products at 880 to 1000 TFLOP/s."
    ]


@pytest.mark.prove
def test_the_command_measures_on_a_cpu_and_a_failing_contender_leaves_the_others(board_table, tmp_path):
    fails = tmp_path / "fails.py"
    fails.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import board\n"
        "def broken(race):\n"
        "    raise RuntimeError('broken on purpose')\n"
        "board.Board.as_it_comes = broken\n"
        "board.main()\n"
    )
    file = tmp_path / "board.json"
    command = [sys.executable, fails, "--quick", "--shapes", "launch-bound", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = board_table.read([file])
    assert [(each.contender, bool(each.rates), each.error) for each in records] == [
        ("hand-written", True, ""),
        ("as-it-comes", False, "RuntimeError: broken on purpose"),
        ("hand-written", True, ""),
    ]
