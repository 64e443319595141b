"""`sw.plan`: one Spec in, one Report out, on a short way from the shell to the cost of a plan."""

import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

import shardwise as sw
from refusals import refuses
from shardwise.cli.main import main
from shardwise.planner.cost import memory
from shardwise.planner.plan import PlanReport
from shardwise.planner.search.search import Candidate
from shardwise.planner.spec import PlanSpec

SOURCE = Path(sw.__file__).parent
MOST_FILES = 6


@pytest.fixture(scope="module")
def report():
    return sw.plan("gpt2", cluster="2xH100", batch_size=64)


def test_a_report_has_candidates_reasons_and_the_best_plan(report):
    assert isinstance(report, PlanReport)
    assert isinstance(report.best, sw.Plan)
    assert report.best.layout.world_size == 2
    assert report.best.batch_size == 64
    assert len(report.candidates) > 1
    assert report.rejected["offload"].startswith("not needed")
    assert report.exit_code == 0


def test_the_command_shows_what_the_report_is(report, capfd, tmp_path):
    asked = ["plan", "gpt2", "--cluster", "2xH100", "--batch-size", "64"]
    path = tmp_path / "plan.toml"
    assert main([*asked, "--json", "--out", str(path)]) == report.exit_code
    assert capfd.readouterr().out == msgspec.structs.replace(report, out=str(path)).to_json() + "\n"
    assert path.read_text() == report.to_toml()
    assert main(asked) == report.exit_code
    assert capfd.readouterr().out == report.to_text() + "\n"


def test_families_with_the_same_reason_are_on_one_line():
    report = sw.plan("gpt2", cluster="1xH100", batch_size=64)
    rejected = report.rejected["tp"]
    families = [family for family, why in report.rejected.items() if why == rejected]
    assert {"zero1", "tp", "pp"} <= set(families)
    assert [line for line in report.to_text().splitlines() if rejected in line] == [
        f"{', '.join(families)}: {rejected}"
    ]


QUESTIONS = [
    {"model": "llama3-8b", "cluster": "48xH100", "batch_size": 500},
    {"model": "llama3-405b", "cluster": "2048xH100", "plan": "fsdp"},
    {"model": "llama-7b", "cluster": "8xA100-40GB", "engine": "deepspeed"},
    {"model": "llama3-8b", "cluster": "8xH100", "engine": "deepspeed"},
    {"model": "llama3-405b", "cluster": "16384xH100", "batch_size": 16384, "engine": "deepspeed"},
    {"model": "llama3-8b", "cluster": "8xH100", "plan": "fsdp", "compile": "blocks"},
    {"model": "llama3-8b", "cluster": "64xH100", "all": True},
    {"model": "llama-70b", "cluster": "8xH100", "tokens": "1T", "price": 2.5},
    {"model": "gpt2", "cluster": "64xH100", "max_gpus": 64, "batch_size": 32},
    {"model": "llama-7b", "cluster": "1xT4"},
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: " ".join(map(str, question.values())))
def test_a_report_fits_a_terminal_of_80_columns(question, monkeypatch):
    """Only the command to copy is not wrapped; a report for a file has each sentence on a line."""
    report = sw.plan(**question)
    sentences = report.to_text()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", report.to_text()).splitlines()
    monkeypatch.undo()
    assert [line for line in shown if len(line) > 80 and not line.startswith("next ")] == []
    start = next(number for number, line in enumerate(shown) if line.startswith("family"))
    rows = " ".join(shown[start : shown.index("", start)]).split()
    for candidate in report.candidates if report.spec.every else report.answer.families.values():
        assert not isinstance(candidate, Candidate) or str(candidate.plan.layout) in rows
    assert all(str(form.best.plan.layout) in rows for form in report.forms if form.best is not None)
    assert "MFU" in rows
    for reason in {} if report.spec.every else report.rejected.values():
        assert reason in sentences
        assert reason in " ".join(" ".join(shown).split())


def test_a_narrow_terminal_shows_whole_numbers(monkeypatch):
    report = sw.plan("llama3-70b", cluster="256xH100")
    plain = report.to_text().splitlines()
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", report.to_text()).splitlines()
    for family, entry in report.answer.families.items():
        if entry.memory is not None:  # it has a row in the table
            rows = [next(line.split() for line in lines if line.startswith(f"{family} ")) for lines in (plain, shown)]
            assert rows[0] == rows[1]


def test_a_spec_travels_as_json_and_asks_the_same(report):
    spec = PlanSpec.from_json(report.spec.to_json())
    assert spec == report.spec
    assert sw.plan(spec).to_json() == report.to_json()


def test_every_candidate_is_data_when_all_are_asked_for(report):
    every = sw.plan(report.spec.replace(every=True))
    assert len(json.loads(every.to_json())["candidates"]) == len(report.candidates)


def test_a_job_is_planned_as_an_object():
    job = sw.Job(
        model=lambda: torch.nn.Linear(4, 2),
        data=lambda split: [(torch.zeros(4), 0)] * 8,
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=0.1),
        batch_size=8,
        steps=1,
    )
    report = sw.plan(job, cluster="2xH100")
    assert report.best is not None
    assert report.best.batch_size == 8
    with refuses("cli.option-not-applicable", "--length", "the job"):
        sw.plan(job, length=128)


def test_where_nothing_fits_the_report_names_what_would():
    report = sw.plan("llama-7b", cluster="1xT4", batch_size=8, length=128)
    assert (report.best, report.exit_code) == (None, 3)
    assert "--cluster" in report.advice
    with refuses("plan.none-fits"):
        report.to_toml()


def test_help_shows_each_option_with_its_default():
    parameters = inspect.signature(sw.plan).parameters
    assert next(iter(parameters)) == "model"
    assert parameters["cluster"].default == "this"
    assert {"batch_size", "length", "precision", "engine", "lora", "catalogue", "all"} <= set(parameters)


def test_few_files_lie_between_the_shell_and_the_cost_of_a_plan(monkeypatch, capfd):
    """Every function of ours that is open when memory is predicted, counted by file."""
    paths = []
    predict = memory.predict_memory.__code__

    def trace(frame, event, _):
        if event == "call" and frame.f_code is predict and not paths:
            while frame is not None:
                paths.append(Path(frame.f_code.co_filename))
                frame = frame.f_back

    sys.setprofile(trace)
    try:
        main(["plan", "gpt2", "--cluster", "2xH100", "--json"])
    finally:
        sys.setprofile(None)
    capfd.readouterr()
    ours = dict.fromkeys(str(path.relative_to(SOURCE)) for path in reversed(paths) if path.is_relative_to(SOURCE))
    assert next(iter(ours)) == "cli/main.py"
    assert list(ours)[-1] == "planner/cost/memory.py"
    assert len(ours) <= MOST_FILES, list(ours)
