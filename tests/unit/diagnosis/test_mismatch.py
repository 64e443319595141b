"""The mismatch guard: what differs is named with both lines, and what may differ is not."""

import pytest
from diagnosis.collectives import call

from shardwise.diagnosis.guard.mismatch import CallComparison
from shardwise.runs.calls import GroupKey

PAIR = GroupKey("0", 0, (0, 1))


def compare(*by_rank, last=True):
    comparison = CallComparison()
    for rank, calls in enumerate(by_rank):
        comparison.feed(rank, calls)
    return comparison.findings(last=last)


def one(**facts):
    return [call(3, group=PAIR, **facts)]


def test_equal_calls_are_equal():
    assert compare(one(), one()) == []


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"match": "max float32*4"}, "the reduce operation"),
        ({"match": "sum float64*4"}, "the dtype"),
        ({"match": "sum float32*6"}, "the shape"),
        ({"match": "sum int64*6"}, "the dtype and the shape"),
        ({"name": "broadcast", "match": "root 0 float32*4"}, "the operation"),
        ({"match": "sum float32*4 float32*4"}, "the dtype and the shape"),
    ],
)
def test_what_differs_is_named_with_both_lines(facts, what):
    [text] = compare(one(site="/x/a.py:1"), one(site="/x/b.py:2", **facts))
    assert text.startswith(f"ranks differ in {what} at the same call: rank 0: all_reduce #3")
    assert "/x/a.py:1" in text
    assert "/x/b.py:2" in text


def test_another_root_is_named_as_such():
    [text] = compare(one(name="broadcast", match="root 0 float32*4"), one(name="broadcast", match="root 1 float32*4"))
    assert "differ in the root" in text


def test_the_many_come_before_the_few():
    group = GroupKey("0", 0, (0, 1, 2))
    same = [call(3, group=group)]
    [text] = compare([call(3, group=group, match="max float32*4")], same, same)
    assert "ranks 1-2: all_reduce" in text
    assert text.index("ranks 1-2") < text.index("rank 0")


def test_calls_of_different_numbers_are_not_compared():
    assert compare([call(3, group=PAIR)], [call(4, group=PAIR, name="barrier", match="")]) == []


def test_a_send_fits_a_receive_of_its_size_and_no_other():
    send = one(name="send", channel="0>1:0", match="float32*4")
    assert compare(send, one(name="recv", channel="0>1:0", match="float32*4")) == []
    [text] = compare(send, one(name="recv", channel="0>1:0", match="float32*8"))
    assert "differ in the shape" in text


def test_a_mismatch_is_reported_once_and_its_consequences_are_not():
    comparison = CallComparison()
    for number, match in enumerate(["sum float32*4", "max float32*4", "min float32*4"]):
        comparison.feed(0, [call(number, group=PAIR)])
        comparison.feed(1, [call(number, group=PAIR, match=match)])
    assert len(comparison.findings(last=True)) == 1
    comparison.feed(0, [call(9, group=PAIR)])
    comparison.feed(1, [call(9, group=PAIR, match="max float32*4")])
    assert comparison.findings(last=True) == []


def test_a_difference_waits_one_look_for_members_that_have_not_come_yet():
    comparison = CallComparison()
    group = GroupKey("0", 0, (0, 1, 2))
    comparison.feed(0, [call(3, group=group)])
    comparison.feed(1, [call(3, group=group, match="max float32*4")])
    assert comparison.findings() == []
    comparison.feed(2, [call(3, group=group)])
    [text] = comparison.findings()
    assert "ranks 0, 2" in text


def lines(*numbers):
    return [call(n, group=PAIR, site=f"/x/train.py:{line}") for n, line in enumerate(numbers, 1)]


def test_a_skipped_call_of_the_same_shape_is_named():
    whole = [20, 21] * 12
    skipped = whole[:4] + whole[5:]
    [text] = compare(lines(*whole), lines(*skipped), last=False)
    assert text.startswith("rank 1 skipped all_reduce #5 (sum float32*4) at /x/train.py:20")
    [text] = compare(lines(*skipped), lines(*whole), last=False)
    assert text.startswith("rank 0 skipped")


def test_two_calls_in_opposite_order_are_named():
    [text] = compare(lines(*[20, 21] * 5), lines(*[21, 20] * 5), last=False)
    assert "opposite order" in text
    assert "/x/train.py:20" in text
    assert "/x/train.py:21" in text


def test_a_branch_by_rank_is_not_a_mismatch():
    assert compare(lines(*[20, 30] * 10), lines(*[21, 31] * 10), last=False) == []


def test_a_branch_by_data_is_not_a_mismatch():
    assert (
        compare(
            lines(20, 20, 21, 20, 21, 21, 20, 20, 21, 20, 20),
            lines(20, 21, 21, 20, 20, 21, 21, 20, 20, 20, 21),
            last=False,
        )
        == []
    )


def test_a_root_that_rotates_is_not_a_mismatch():
    def turns(rank):
        return [
            call(
                n,
                group=PAIR,
                name="broadcast",
                match=f"root {n % 2} float32*4",
                site=f"/x/t.py:{1 if n % 2 == rank else 2}",
            )
            for n in range(1, 30)
        ]

    assert compare(turns(0), turns(1), last=False) == []
