"""Rules of what stays, as they are typed."""

import pytest

from shardwise.errors import InputError
from shardwise.run.keep import Keep, parse_keep


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
    ("text", "words"),
    [
        ("", "'', which is no rule"),
        ("0", "'0', which is no rule"),
        ("-1", "'-1', which is no rule"),
        ("3,", "'', which is no rule"),
        ("2y", "'2y', which is no rule"),
        ("best:loss", "'best:loss', which is no rule"),
        ("max:", "'max:', which is no rule"),
        ("3,all", "'all', which is no rule"),
        ("1d,2d", "says age twice"),
        ("min:a,max:b", "says metric twice"),
    ],
)
def test_what_is_no_rule_is_named(text, words):
    with pytest.raises(InputError, match=words):
        parse_keep(text)
