"""Steps as they are measured: phases add up, memory is counted, a fake world trains like a real one."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch

from shardwise.bench.phases import PHASES, PhaseClock
from shardwise.bench.step import compare, rehearse
from shardwise.cli.main import main
from shardwise.errors import InputError
from shardwise.plan import Plan

JOB = """
import torch
import shardwise as sw

rows = torch.arange(640).reshape(40, 16) % 50
job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50)),
    data=lambda split: torch.utils.data.TensorDataset(rows, rows),
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-3),
    batch_size=8,
    epochs=1,
)
"""


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


@pytest.fixture
def job():
    space = {}
    exec(JOB, space)
    return space["job"]


def test_one_rank_of_a_fake_world_is_measured(job):
    measured = rehearse(job, Plan.preset("zero3", 4, batch_size=8), rank=1, steps=3)
    assert (measured.rank, measured.world_size, measured.backend) == (1, 4, "fake")
    assert measured.step.repeats == 3
    assert list(measured.phases) == list(PHASES)
    assert all(seconds > 0 for seconds in measured.phases.values())
    assert measured.tokens_per_s == pytest.approx(16 * measured.samples_per_s)
    parameters = 50 * 32 + 32 * 50 + 50
    assert measured.peak_bytes > 3 * 4 * parameters / 4
    assert 0 < sum(num_bytes for _, num_bytes in measured.at_peak) <= measured.peak_bytes


def test_gradients_that_are_garbage_do_not_keep_a_fake_world_from_its_optimizer(job):
    def never(output, batch):
        return output.sum() * math.nan

    garbage = dataclasses.replace(job, loss=dataclasses.replace(job.loss, sum=never))
    measured = rehearse(garbage, Plan.preset("zero3", 4, batch_size=8), steps=1)
    assert any(words.startswith("optimizer states") for words, _ in measured.at_peak)


def test_phases_add_up_to_the_time_between_their_marks():
    clock = PhaseClock(torch.device("cpu"))
    for _ in range(2):
        for phase in ("data", "forward", "backward", "forward", "backward", "", "optimizer"):
            clock.begin(phase)
    clock.begin("")
    first, second = clock.finish()
    assert set(first) == set(second) == set(PHASES)
    assert all(seconds > 0 for seconds in first.values())
    assert clock.finish() == []


def test_predictions_stand_beside_what_they_predict(job):
    measured = rehearse(job, Plan.preset("ddp", 2, batch_size=8), steps=1)
    rows = {name: (value, predicted) for name, value, predicted in compare(measured, {"peak_bytes": 1.0})}
    assert rows["peak_bytes"] == (measured.peak_bytes, 1.0)
    assert rows["step_s"] == (measured.step.median_s, None)


def test_a_rank_outside_the_world_is_refused(job):
    with pytest.raises(InputError, match="use 0 to 1"):
        rehearse(job, Plan.preset("ddp", 2, batch_size=8), rank=2)


def test_two_real_ranks_are_measured_from_the_command_line(job_file):
    command = [sys.executable, "-m", "shardwise", "bench", "step", str(job_file), "--nproc", "2", "--steps", "2"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--json"], capture_output=True, text=True, check=True, timeout=100
    )
    found = json.loads(done.stdout)["measured"]
    assert [(rank["rank"], rank["backend"], rank["plan"]) for rank in found] == [
        (0, "gloo", "replicate2"),
        (1, "gloo", "replicate2"),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank", "1"], "--fake-world N"),
        (["--fake-world", "2", "--nproc", "2"], "leave one out"),
        (["--fake-world", "2", "--rank", "2"], "use 0 to 1"),
        (["--fake-world", "0"], "--fake-world"),
        (["--fake-world", "2", "--plan", "pp"], "--nproc 2"),
        (["--plan", "zero9"], "zero9"),
    ],
)
def test_bad_input_gets_one_sentence(job_file, capsys, options, words):
    assert main(["bench", "step", str(job_file), "--device", "cpu", *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_rank_of_another_launcher_does_not_start_ranks(job_file, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "step", str(job_file)]) == 2
    assert "run it by itself" in capsys.readouterr().err


def test_the_table_shows_figures_in_their_units(job_file, capsys):
    assert main(["bench", "step", str(job_file), "--device", "cpu", "--fake-world", "2", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("plan replicate2 · rank 0 of 2 (fake world) · CPU")
    assert " ms" in shown
    assert " MiB" in shown
