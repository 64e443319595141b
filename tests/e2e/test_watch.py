"""`shardwise watch` beside real runs: a training that loses a rank, a script that fails."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.processes import wait_for
from env.chromium import chromium, needs_chromium
from shardwise.cli.main import main

SHARDWISE = [sys.executable, "-m", "shardwise"]
ROOT = Path(__file__).resolve().parents[2]
JOB = """
import time
import torch
import shardwise as sw

job = sw.Job(
    model=lambda: torch.nn.Linear(64, 10),
    data=lambda split: sw.datasets.digits(split) if split == "train" else None,
    loss=sw.losses.cross_entropy,
    forward=lambda model, batch: model(batch[0].flatten(1)),
    optimizer=sw.sgd(lr=0.01),
    batch_size=64,
    steps=1_000_000,
    on_step=lambda _: time.sleep(0.01),  # leaves the cores to the browser
)
"""


@contextlib.contextmanager
def started(*argv, **options):
    """Start a command, and end it if it is still there; background jobs of a shell do not hear SIGINT."""
    process = subprocess.Popen([*SHARDWISE, *map(str, argv)], text=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()


@contextlib.contextmanager
def watched(run):
    """Serve the page of a run, and yield its address."""
    with started("watch", run, "--web", stdout=subprocess.PIPE) as server:
        yield re.search(r"http://\S+", server.stdout.readline())[0]


@needs_chromium
def test_page_follows_a_training_over_the_restart_of_the_job_and_of_the_server(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    run = tmp_path / "run"
    options = ["--nproc", 2, "--device", "cpu", "--run-dir", run, "--save-every", 50, "--max-restarts", 1]
    with (
        started("train", tmp_path / "job.py", *options, stderr=subprocess.DEVNULL) as training,
        chromium() as browser,
    ):
        wait_for((run / "events").exists, 60)
        with watched(run) as url:
            page = browser.open(url)
            steps = (
                "Number(document.querySelector('#step').textContent.replaceAll(',', '').match(/step (\\d+)/)?.[1] ?? 0)"
            )
            # it updates while the job trains
            seen = page.wait_for(steps)
            page.wait_for(f"{steps} > {seen}")
            page.wait_for("document.querySelectorAll('#ranks tbody tr').length === 2")
            assert page.wait_for("document.querySelector('#ranks .chip').textContent") in PHASES
            page.wait_for("document.querySelector('#checkpoints').textContent.includes('iB')")

            # and after a rank was killed
            pid = int(page.evaluate("document.querySelector('#ranks tbody tr:last-child').cells[8].textContent"))
            os.kill(pid, signal.SIGKILL)
            page.wait_for("document.querySelector('canvas').getAttribute('aria-label').includes('restarted 1 times')")
            page.wait_for("document.querySelector('#entries').textContent.includes('restart 1 of 1: rank 1 failed')")
            assert page.errors == []
        page.wait_for("!document.querySelector('#lost').hidden")
        with watched(run) as again:
            # and when its server is back, where it was
            assert again == url
            page.wait_for("document.querySelector('#lost').hidden")
            page.wait_for(f"{steps} > {page.evaluate(steps)}")
            training.send_signal(signal.SIGTERM)
            page.wait_for("document.querySelector('#state').textContent === 'stopped'")
            assert [error for error in page.errors if "ERR_CONNECTION_REFUSED" not in error] == []


PHASES = {"start", "data", "forward", "backward", "optimizer", "publish", "evaluate", "save", "end"}

SCRIPT = """
import os
print("hello from", os.environ["RANK"])
if os.environ["RANK"] == "1":
    raise ValueError("tired")
"""


def test_watch_of_a_script_that_failed_reports_its_end(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [
        "launch",
        "--nproc",
        "2",
        "--max-restarts",
        "1",
        "--log-dir",
        "run",
        "--no-python",
        sys.executable,
        "script.py",
    ]
    failed = subprocess.run([*SHARDWISE, *launch], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert failed.returncode == 1, failed.stderr
    seen = subprocess.run(
        [*SHARDWISE, "watch", "run", "--predict"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert seen.returncode == 0, seen.stderr
    assert "failed" in seen.stdout.splitlines()[0]
    assert "1 restart" in seen.stdout
    assert "no prediction: " in seen.stdout
    assert "rank 1 failed first: ValueError: tired" in seen.stdout
    assert re.search(r"^1 +\S+ .*failed: ValueError: tired", seen.stdout, re.MULTILINE)
    [events] = (tmp_path / "run" / "events").iterdir()
    assert events.name == "launcher.jsonl"
    assert str(sys.executable) in events.read_text()
    assert "script.py" not in events.read_text()  # arguments may hold secrets


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["none"], "run directory none does not exist"),
        (["."], ". is not a run directory"),
        (["file"], "file is a file"),
        (["run", "--port", "70000"], "70000 is not in the range"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys, argv, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["watch", *argv]) == 2
    complaint = capsys.readouterr().err
    assert expected in complaint
    assert len(complaint.strip().splitlines()) == 1
