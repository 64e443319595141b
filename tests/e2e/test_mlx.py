"""Jobs in MLX from the command line: trained on two processes, killed and resumed on one, refused in a sentence."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest

pytest.importorskip("mlx.core")

from e2e.mlx_jobs import DIGITS, EPOCHS, LAZY, POINTS, ROWS, STEPS_PER_EPOCH
from e2e.processes import working_in
from env.lacking import python_lacking
from shardwise.cli.main import main

UNCOMPILED = {"MLX_DISABLE_COMPILE": "1"}
"""A step's Python runs each time, and no kernel is compiled, which takes seconds on a CPU."""


def shardwise(folder, *arguments, python=sys.executable, **variables):
    command = [python, "-m", "shardwise", *arguments]
    environ = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=250, check=False)


def train(folder, run, *arguments, **variables):
    done = shardwise(folder, "train", "job.py", "--run-dir", run, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done


def losses(run):
    """Losses by step, the last time each was trained."""
    found = {}
    for line in (run / "events" / "rank0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "steps":
            found.update(enumerate(event["losses"], event["first"]))
    return found


def trained_rows(folder, log):
    """Rows by step, as all ranks of one start wrote them down."""
    rows = {}
    for path in folder.glob(f"{log}-*"):
        for line in path.read_text().splitlines():
            number, *found = map(int, line.split())
            rows.setdefault(number, []).extend(found)
    return rows


def assert_refused(done, folder, expected):
    """One sentence, exit code 2, and nothing left: no run, no process."""
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert expected in done.stderr
    assert not list(folder.glob("run*"))
    assert working_in(folder) == []


@pytest.mark.prove
def test_killed_on_two_and_resumed_on_one_every_row_is_trained_once(tmp_path):
    (tmp_path / "job.py").write_text(POINTS)
    train(tmp_path, "whole", LOG="rows-whole", **UNCOMPILED)
    (tmp_path / "order").write_text("kill")
    options = ("--run-dir", "first", "--nproc", "2", "--save-every", "3")
    died = shardwise(tmp_path, "train", "job.py", *options, LOG="rows-first", **UNCOMPILED)
    assert died.returncode == 1
    assert "rank 1 failed first: SIGKILL" in died.stderr
    assert working_in(tmp_path) == []
    done = train(tmp_path, "second", "--resume", "first", LOG="rows-second", **UNCOMPILED)
    begun = int(re.search(r"resumed from .* at step (\d+)", done.stderr)[1])
    assert 3 <= begun <= 9
    rows = {step: found for step, found in trained_rows(tmp_path, "rows-first").items() if step < begun}
    rows |= trained_rows(tmp_path, "rows-second")
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        assert Counter(row for step in steps for row in rows[step]) == Counter(range(ROWS))
    lost = {step: loss for step, loss in losses(tmp_path / "first").items() if step < begun}
    assert lost | losses(tmp_path / "second") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


def _start(run):
    lines = (run / "events" / "rank0.jsonl").read_text().splitlines()
    return next(event for event in map(json.loads, lines) if event["kind"] == "start")


@pytest.mark.prove
def test_two_processes_give_the_losses_of_one_and_a_run_that_can_be_looked_at(tmp_path):
    (tmp_path / "job.py").write_text(DIGITS)
    for number in ("1", "2"):
        train(tmp_path, f"on{number}", "--nproc", number, "--set", "epochs=1", **UNCOMPILED)
    one, two = losses(tmp_path / "on1"), losses(tmp_path / "on2")
    assert len(one) == 23
    assert two == pytest.approx(one, rel=1e-5)
    facts = {name: (value, source) for name, value, source in _start(tmp_path / "on2")["facts"]}
    assert facts["engine"][1] == "the job's engine"
    assert facts["plan"] == ("replicate2 (zero 0)", "auto: MLX trains replicas")
    assert json.loads((tmp_path / "on2" / "report.json").read_text())["result"]["evaluation"]["accuracy"] > 0.9
    watched = shardwise(tmp_path, "watch", "on2", "--once")
    assert watched.returncode == 0, watched.stderr


@pytest.mark.prove
def test_digits_reach_97_percent_on_two_processes_compiled(tmp_path):
    (tmp_path / "job.py").write_text(DIGITS)
    for number in ("1", "2"):
        train(tmp_path, f"on{number}", "--nproc", number)
    report = json.loads((tmp_path / "on2" / "report.json").read_text())
    assert report["result"]["evaluation"]["accuracy"] >= 0.97
    assert losses(tmp_path / "on2") == pytest.approx(losses(tmp_path / "on1"), abs=1e-5)


@pytest.mark.prove
def test_a_rank_that_stands_still_is_named_and_nothing_is_left(tmp_path):
    (tmp_path / "job.py").write_text(POINTS)
    (tmp_path / "order").write_text("stop")
    options = ("--nproc", "2", "--run-dir", "run", "--hang-after", "3", "--on-hang", "stop")
    done = shardwise(tmp_path, "train", "job.py", *options, LOG="rows", **UNCOMPILED)
    assert done.returncode == 1
    # The signal may reach rank 1 in the sums of a step, or where ranks agree on what the callback returned.
    assert re.search(r"rank 0 waits in (the sums of step|all_reduce) #\d+ .*; rank 1 is stopped by a", done.stderr)
    assert working_in(tmp_path) == []


def test_a_ring_host_that_cannot_be_reached_is_refused_within_seconds(tmp_path):
    (tmp_path / "job.py").write_text(POINTS)
    (tmp_path / "hosts.json").write_text('[["127.0.0.1:25101"], ["192.0.2.7:25102"]]')
    began = time.monotonic()
    done = shardwise(tmp_path, "train", "job.py", "--nproc", "2", "--run-dir", "run", MLX_HOSTFILE="hosts.json")
    assert time.monotonic() - began < 60
    assert_refused(done, tmp_path, "cannot listen at 192.0.2.7:25102 for MLX's ring")
    assert done.stderr.startswith("shardwise: rank 1 on ")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("train job.py --nproc 2 --plan zero3", "support.mlx-axis"),
        ("train job.py --nproc 2 --plan pp", "support.mlx-axis"),
        ("train job.py --set precision=fp16", "support.mlx-fp16"),
        ("train job.py --device cuda", "support.mlx-device"),
        ("plan job.py", "support.mlx-model"),
        ("verify job.py --plans tp --nproc 2", "support.mlx-axis"),
        ("bench step job.py", "support.mlx-model"),
        ("bench scaling job.py", "support.mlx-model"),
        ("bench overlap job.py", "support.mlx-model"),
        ("doctor drill job.py", "support.mlx-model"),
    ],
)
def test_what_mlx_cannot_do_is_refused_in_one_sentence(tmp_path, monkeypatch, capfd, arguments, code):
    (tmp_path / "job.py").write_text(POINTS)
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    printed = capfd.readouterr().err
    assert f"[{code}]" in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "runs").exists()


NEEDED = "engine mlx needs MLX, which is not installed: pip install 'shardwise[mlx]'"


@pytest.mark.representative("asked for")
@pytest.mark.parametrize(
    ("verb", "job", "expected"),
    [
        ("train", POINTS, "No module named 'mlx': pip install 'shardwise[mlx]'"),
        ("train", LAZY, NEEDED),
        pytest.param("verify", LAZY, NEEDED, marks=pytest.mark.prove),
    ],
    ids=["imported", "asked for", "verified"],
)
def test_without_mlx_one_sentence_names_the_pip_line(tmp_path, verb, job, expected):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "job.py").write_text(job)
    python = python_lacking(tmp_path / "lacking", "mlx")
    assert_refused(shardwise(folder, verb, "job.py", python=python), folder, expected)
