"""Tensor rules in a file: what a Job reads back, and what it refuses."""

import pytest

import shardwise as sw
from refusals import refuses
from shardwise.job import load_job, refer
from shardwise.job.job import as_rules, rules_to_toml

RULES = {"blocks.*.up": "column", "blocks.*.down": "row"}


def job(rules):
    return sw.Job(
        model=lambda: None,
        data=sw.datasets.digits,
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=0.1),
        batch_size=1,
        steps=1,
        tensor_rules=rules,
    )


def test_a_job_reads_the_file_that_was_written(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(rules_to_toml(RULES, "confirmed"))
    assert job(str(path)).tensor_rules == RULES


FILE = """
import shardwise as sw

def job():
    return sw.Job(
        model=lambda: None, data=sw.datasets.digits, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-3),
        batch_size=8, steps=1, tensor_rules="rules.toml",
    )

at_once = job()
"""


@pytest.mark.parametrize("attribute", ["job", "at_once"])
def test_path_is_relative_to_the_job_file_then_to_the_current_directory(tmp_path, monkeypatch, attribute):
    jobs, here = tmp_path / "jobs", tmp_path / "here"
    jobs.mkdir()
    here.mkdir()
    (jobs / "job.py").write_text(FILE)
    monkeypatch.chdir(here)
    reference = refer(f"../jobs/job.py:{attribute}", {})
    with refuses("job.tensor-rules-read-failed", jobs / "rules.toml", here / "rules.toml"):
        load_job(reference)
    (here / "rules.toml").write_text(rules_to_toml({"here": "row"}, "rules"))
    assert load_job(reference).tensor_rules == {"here": "row"}
    (jobs / "rules.toml").write_text(rules_to_toml({"there": "row"}, "rules"))
    assert load_job(reference).tensor_rules == {"there": "row"}
    typed = refer(reference.path + f":{attribute}", {"tensor_rules": "rules.toml"})
    assert load_job(typed).tensor_rules == {"here": "row"}  # --set is relative to the current directory


def test_rules_and_none_stay_as_they_are():
    assert job(RULES).tensor_rules == RULES
    assert as_rules(None) is None


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("not toml at all", ("job.tensor-rules-not-toml", "rules.toml")),
        ("[rules]\na = 'column'\n", ("job.tensor-rules-no-table", "[tensor_rules]")),
        ("[tensor_rules]\na = 1\n", ("job.tensor-rules-no-table", "[tensor_rules]")),
        ("[tensor_rules]\nblocks.up = 'column'\n", ("job.tensor-rules-no-table", "[tensor_rules]")),
    ],
)
def test_a_file_without_rules_is_refused(tmp_path, text, refusal):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with refuses(*refusal):
        job(str(path))


def test_a_value_of_another_kind_is_refused():
    with refuses("job.tensor-rules-invalid", "Job.tensor_rules", "['up']"):
        job(["up"])
