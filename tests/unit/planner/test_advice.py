"""Thirty questions with an expert's answers (advice.toml), which the planner must give as well."""

import tomllib
from pathlib import Path

import pytest

from shardwise.hardware.cluster import parse_cluster
from shardwise.planner.plan import plan

QUESTIONS = tomllib.loads(Path(__file__).with_name("advice.toml").read_text())["question"]


def row(question):
    reason = question.get("disagrees")
    marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
    return pytest.param(question, id=question["name"], marks=marks)


@pytest.mark.parametrize("question", [row(each) for each in QUESTIONS])
def test_the_planner_answers_like_an_expert(question):
    options = {key: question[key] for key in ("length", "lora") if key in question}
    report = plan(
        question["model"], cluster=question["cluster"], batch_size=question["batch"], history=False, **options
    )
    best = report.answer.best
    if not question["families"]:
        assert best is None
        return
    assert best.family in question["families"]
    layout = best.plan.layout
    for axis in ("pp", "cp", "tp"):
        assert getattr(layout, axis) in question.get(axis, [getattr(layout, axis)])
    assert layout.shard <= question.get("most_shards", layout.shard)
    assert layout.world_size in question.get("uses", [parse_cluster(question["cluster"]).num_devices])
    if "batches" in question:
        named = [hint.batch_size for hint in report.hints if hint.batch_size != question["batch"]]
        assert named == question["batches"]
    if "fewest" in question:
        assert min(hint.num_devices for hint in report.hints) <= question["fewest"]


def test_the_table_has_thirty_questions_with_reasons():
    assert len(QUESTIONS) >= 30
    assert all(question["expert"].endswith(".") for question in QUESTIONS)
    assert len({question["name"] for question in QUESTIONS}) == len(QUESTIONS)
