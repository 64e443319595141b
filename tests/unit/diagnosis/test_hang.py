"""The hang verdict: who is named, and who is left in peace."""

from dataclasses import replace

import pytest
from diagnosis.collectives import WORLD, at, away, call, doing, waiting, world

from shardwise.diagnosis.guard.hang import BUSY_FACTOR, decide
from shardwise.runs.calls import GroupKey

THREE = [waiting(rank) for rank in range(3)]


def test_a_rank_that_others_wait_for_is_named_with_its_place():
    stall = decide(world(*THREE, away(3, activity=doing())), 10)
    assert stall.is_verdict
    assert stall.text == (
        "ranks 0-2 wait in all_reduce #5 (sum float32*4) at /x/train.py:8 for 12 s;"
        " rank 3 is in load at /x/data.py:41 for 12 s"
    )


def test_nobody_is_named_before_the_limit():
    assert decide(world(*[waiting(rank, for_s=9) for rank in range(3)], away(3, quiet_s=9)), 10) is None


def test_nobody_is_named_when_all_have_come():
    assert decide(world(*THREE, waiting(3)), 10) is None


def test_a_rank_that_has_arrived_and_continued_is_not_missing():
    assert decide(world(*THREE, away(3, sequence=6)), 10) is None


def test_a_rank_that_gave_a_sign_since_is_not_missed():
    assert decide(world(*THREE, away(3, quiet_s=2)), 10) is None


def test_a_rank_that_waits_elsewhere_for_a_moment_is_not_missed():
    """A thread of ranks 0-2 waits for a slow checkpoint of rank 3, whose training continues in another group."""
    training = GroupKey("1", 0, (0, 1, 2, 3))
    busy = replace(waiting(3, 900, for_s=0.01, group=training), progress=(at(4), at(900, training)))
    assert decide(world(*THREE, busy), 10) is None


def test_a_rank_of_which_nothing_is_known_is_not_blamed():
    assert decide(world(*THREE), 10) is None


@pytest.mark.parametrize(
    ("status", "patience"),
    [
        ({"activity": doing()}, 1),
        ({"activity": doing(moving=True)}, BUSY_FACTOR),
        ({"activity": doing("compiles")}, BUSY_FACTOR),
        ({"activity": doing("saves or loads a checkpoint")}, BUSY_FACTOR),
        ({"activity": doing(cores=0.9)}, BUSY_FACTOR),
        ({"activity": doing(bytes_per_s=1e6)}, BUSY_FACTOR),
        ({"activity": doing(cores=0.01, bytes_per_s=100.0)}, 1),
        ({"activity": doing("evaluates")}, BUSY_FACTOR),
        ({"activity": doing("copies files")}, BUSY_FACTOR),
        ({"activity": doing("waits for data")}, 1),
        ({"activity": doing("waits for data", moving=True)}, 1),
        ({"activity": doing("waits for data", moving=True, cores=0.9)}, BUSY_FACTOR),
        ({"activity": doing("waits for data", bytes_per_s=1e6)}, BUSY_FACTOR),
        ({"activity": doing("waits for data"), "first_batch": True, "loads": True}, BUSY_FACTOR),
        ({"phase": "save"}, BUSY_FACTOR),
        ({"phase": "evaluate"}, BUSY_FACTOR),
        ({"phase": "forward"}, 1),
        ({}, 1),
    ],
    ids=str,
)
def test_patience_follows_what_the_missing_rank_does(status, patience):
    def verdict_after(seconds):
        ranks = [waiting(rank, for_s=seconds) for rank in range(3)]
        return decide(world(*ranks, away(3, quiet_s=seconds, **status)), 10).is_verdict

    assert verdict_after(10 * patience)
    assert patience == 1 or not verdict_after(10 * patience - 1)


def test_a_small_limit_leaves_a_rank_that_compiles_its_minutes():
    def verdict_after(seconds, **status):
        ranks = [waiting(rank, for_s=seconds) for rank in range(3)]
        return decide(world(*ranks, away(3, quiet_s=seconds, **status)), 2).is_verdict

    assert not verdict_after(299, activity=doing("compiles"))
    assert verdict_after(300, activity=doing("compiles"))
    assert verdict_after(60, activity=doing(moving=True))


def test_a_rank_in_a_known_phase_is_a_note():
    stall = decide(world(*THREE, away(3, activity=doing("compiles"))), 10)
    assert not stall.is_verdict
    assert "rank 3 compiles in load at /x/data.py:41" in stall.text


def test_the_rank_at_the_end_of_the_chain_is_named_first():
    pair = GroupKey("1", 0, (2, 3))
    middle = replace(waiting(2, 7, group=pair), progress=(at(4), at(7, pair)))
    stuck = replace(away(3), progress=(at(4), at(6, pair)))
    stall = decide(world(waiting(0), waiting(1), middle, stuck), 10)
    assert stall.missing[0].rank == 3


def test_ranks_that_wait_for_each_other_are_all_reported():
    one, other = GroupKey("1", 0, (0, 1)), GroupKey("2", 0, (0, 1))
    stall = decide(world(waiting(0, 1, group=one), waiting(1, 1, group=other, site="/x/train.py:9")), 10)
    assert stall.is_verdict
    assert "train.py:8" in stall.text
    assert "train.py:9" in stall.text


def test_a_receive_waits_for_its_sender_alone():
    receive = waiting(0, 1, name="recv", channel="2>0:0", peer=2, match="float32*4")
    stall = decide(world(receive, away(1), away(2, activity=doing()), away(3)), 10)
    assert [status.rank for status in stall.missing] == [2]
    assert stall.text.startswith("rank 0 waits in recv #1")


def test_a_receive_from_anybody_blames_nobody():
    assert decide(world(waiting(0, 1, name="recv", channel="-1>0:0"), away(1)), 10) is None


def test_what_torch_counts_is_compared_with_what_torch_counts():
    def flown(sequence):
        return replace(away(3), progress=(at(sequence, by_torch=True),))

    ranks = [waiting(rank, by_torch=True) for rank in range(3)]
    assert decide(world(*ranks, flown(4)), 10).missing[0].rank == 3
    assert decide(world(*ranks, flown(5)), 10) is None


def test_a_rank_that_was_stopped_by_a_signal_is_named_though_it_has_come():
    stall = decide(world(*THREE, replace(waiting(3), state="stopped")), 10)
    assert stall.is_verdict
    assert "rank 3 is stopped by a signal" in stall.text


def test_a_rank_that_has_ended_is_named_with_its_last_call():
    stall = decide(world(*THREE, away(3, state="gone")), 10)
    assert "rank 3 has ended, its last call was all_reduce #4" in stall.text


def test_a_rank_without_a_stack_is_named_with_its_last_call():
    assert "rank 3 has not arrived for 12 s, its last call was all_reduce #4" in decide(world(*THREE, away(3)), 10).text


def test_the_key_of_a_stall_stays_while_nothing_changes():
    first = decide(world(*THREE, away(3)), 10)
    later = decide(world(*[waiting(rank, for_s=60) for rank in range(3)], away(3, quiet_s=60)), 10)
    assert first.key == later.key
    assert WORLD in first.key


def test_members_that_wait_at_other_lines_are_reported_by_line():
    ranks = [waiting(0), waiting(1), waiting(2, site="/x/train.py:99")]
    text = decide(world(*ranks, away(3)), 10).text
    assert "ranks 0-1 wait in all_reduce #5 (sum float32*4) at /x/train.py:8" in text
    assert "rank 2 waits in all_reduce #5 (sum float32*4) at /x/train.py:99" in text


def test_a_call_without_a_known_line_is_reported_without_it():
    assert call(site="").site == ""
    assert " at " not in decide(world(*[waiting(rank, site="") for rank in range(3)], away(3, newest=None)), 10).text
