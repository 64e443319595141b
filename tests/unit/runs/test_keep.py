"""Rules of what stays, as they are typed."""

import pytest

from refusals import refuses
from shardwise.runs.directory import Keep, parse_keep


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("3", Keep(last=3)),
        ("all", Keep()),
        ("2d", Keep(age_s=172_800)),
        ("1.5h", Keep(age_s=5400)),
        ("max:accuracy", Keep(best=1, metric="accuracy", highest=True)),
        ("3, 30m, min:loss", Keep(last=3, age_s=1800, best=1, metric="loss")),
    ],
)
def test_rules_are_read(text, keep):
    assert parse_keep(text) == keep


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", ("checkpoint.keep-rule-invalid", "''")),
        ("0", ("checkpoint.keep-rule-invalid", "'0'")),
        ("-1", ("checkpoint.keep-rule-invalid", "'-1'")),
        ("3,", ("checkpoint.keep-rule-invalid", "''")),
        ("2y", ("checkpoint.keep-rule-invalid", "'2y'")),
        ("best:loss", ("checkpoint.keep-rule-invalid", "'best:loss'")),
        ("max:", ("checkpoint.keep-rule-invalid", "'max:'")),
        ("3,all", ("checkpoint.keep-rule-invalid", "'all'")),
        ("1d,2d", ("checkpoint.keep-rule-repeated", "age")),
        ("min:a,max:b", ("checkpoint.keep-rule-repeated", "metric")),
    ],
)
def test_what_is_not_a_rule_is_named(text, refusal):
    with refuses(*refusal):
        parse_keep(text)
