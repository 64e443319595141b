"""Tensor rules in a file: what a Job reads back, and what it refuses."""

import pytest

import shardwise as sw
from refusals import refuses
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
    with refuses("job.tensor-rules-invalid", "Job.tensor_rules is ['up']"):
        job(["up"])
