"""The last calls of ranks that ended: the pair that did not match is named, with both lines."""

from diagnosis.collectives import call

from shardwise.runs.call_reader import LastCalls, describe_mismatch
from shardwise.runs.calls import GroupKey

PAIR = GroupKey("0", 0, (0, 1))


def inside(here, **more):
    return LastCalls(inside=(here,), last=(here,), **more)


def left(sequence, group=PAIR, **more):
    return LastCalls(last=(call(sequence, group=group, left=1.0),), **more)


def test_a_rank_that_skipped_a_collective_before_backward_is_named_with_both_lines():
    text = describe_mismatch(
        {0: inside(call(4, group=PAIR, site="/x/a.py:10")), 1: left(3, line="/x/a.py:11", in_backward=True)}
    )
    assert text.startswith("rank 1 did not call all_reduce #4 (sum float32*4) at /x/a.py:10, which rank 0 called")
    assert "rank 1 was in backward at /x/a.py:11" in text


def test_a_bucket_that_torch_recorded_is_named():
    bucket = call(12, group=PAIR, text="gradients, in backward, float32[8320]", entered=3.0)
    text = describe_mismatch(
        {0: inside(call(4, group=PAIR)), 1: left(3, line="/x/a.py:11", in_backward=True, issued=(bucket,))}
    )
    assert "rank 1 was in all_reduce (gradients, in backward, float32[8320]) at /x/a.py:11" in text


def test_a_bucket_that_is_older_than_the_last_recorded_call_is_not_where_the_rank_was():
    bucket = call(12, group=PAIR, text="gradients", entered=1.0)
    newer = LastCalls(last=(call(3, group=PAIR, entered=2.0, left=2.5),), issued=(bucket,), line="/x/a.py:30")
    assert "rank 1 was at /x/a.py:30" in describe_mismatch({0: inside(call(4, group=PAIR)), 1: newer})


def test_one_rank_that_made_a_call_of_its_own_is_named_not_the_many():
    trio = GroupKey("0", 0, (0, 1, 2))
    others = left(3, group=trio, line="/x/a.py:11", in_backward=True)
    text = describe_mismatch({0: others, 1: inside(call(4, group=trio)), 2: others})
    assert text.startswith("rank 1 called all_reduce #4")
    assert "ranks 0, 2 were in backward at /x/a.py:11" in text


def test_a_send_and_a_receive_of_other_sizes_are_named():
    send = call(1, "send", "float32*8", "/x/a.py:5", PAIR, channel="0>1:0", peer=1)
    receive = call(1, "recv", "float32*4", "/x/a.py:6", PAIR, channel="0>1:0", peer=0)
    text = describe_mismatch({0: LastCalls(last=(send,)), 1: inside(receive)})
    assert text.startswith("ranks differ in the shape at the same call: rank 0: send #1")
    assert "/x/a.py:5" in text
    assert "/x/a.py:6" in text


def test_equal_calls_are_no_mismatch():
    assert describe_mismatch({rank: inside(call(4, group=PAIR)) for rank in (0, 1)}) == ""
