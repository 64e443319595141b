import signal
import time

import pytest

from shardwise.launcher.nodes.messages import rebased
from shardwise.launcher.policy import Finish, GiveUp, RankExit, Restart, decide, root_cause
from shardwise.runs.call_reader import LastCalls
from shardwise.runs.failure import Failure, describe_failure


def failure(rank, *, at=0.0, peer_lost=False):
    return Failure(rank=rank, host="h", at=at, kind="E", message="m", traceback="t", exit_code=1, peer_lost=peer_lost)


def exit_(rank, returncode=1, **kwargs):
    return RankExit(rank=rank, returncode=returncode, **kwargs)


def test_all_well_has_no_cause():
    assert root_cause([exit_(0, 0), exit_(1, 0)]) is None


def test_killed_rank_comes_before_an_earlier_exception():
    cause = root_cause([exit_(0, failure=failure(0, at=1.0)), exit_(1, -9, at=2.0)])
    assert cause.rank == 1


def test_own_exception_comes_before_an_early_exit_and_a_lost_peer():
    exits = [
        exit_(0, failure=failure(0, at=1.0, peer_lost=True)),
        exit_(1, 3, at=0.5),
        exit_(2, failure=failure(2, at=2.0)),
    ]
    assert root_cause(exits).rank == 2
    assert root_cause(exits[:2]).rank == 1


def test_rank_that_left_with_zero_is_the_cause_of_a_lost_peer():
    lost = exit_(0, failure=failure(0, peer_lost=True), at=2.0)
    early, late, stopped = exit_(1, 0, at=1.0), exit_(2, 0, at=3.0), exit_(3, 0, at=1.0, stopped=True)
    assert root_cause([lost, early, late, stopped]).rank == 1
    assert root_cause([lost, late, stopped]).rank == 0
    own = exit_(4, failure=failure(4), at=2.0)
    assert root_cause([lost, early, own]).rank == 4


def test_rank_that_destroyed_its_process_group_is_the_cause_of_a_lost_peer_though_it_was_stopped_later():
    lost = exit_(0, failure=failure(0, at=5.0, peer_lost=True), at=2.0)
    left = exit_(1, -15, at=4.0, stopped=True, calls=LastCalls(left_at=4.0))
    on_stop = exit_(2, -15, at=4.0, stopped=True, calls=LastCalls(left_at=6.0))  # while it was stopped
    assert root_cause([lost, left, on_stop]).rank == 1
    assert root_cause([lost, on_stop]).rank == 0
    assert root_cause([lost, left, exit_(3, -9)]).rank == 3


def test_a_restart_has_the_reason():
    def why(cause):
        return Restart(attempt=1, cause=cause).why

    assert why(exit_(1, -9, node_name="node 1 (b)")) == "rank 1 on node 1 (b) failed: SIGKILL"
    assert why(exit_(1, 7)) == "rank 1 failed: exit code 7"
    assert why(exit_(1, failure=failure(1))) == "rank 1 failed: E"
    assert why(exit_(1, 0)) == "rank 1 exited before the other ranks: exit code 0"
    left = exit_(1, -15, stopped=True, calls=LastCalls(left_at=4.0))
    assert why(left) == "rank 1 destroyed its process group before the other ranks"


def test_peers_of_a_rank_that_aborted_get_the_time_to_fail_by_themselves():
    assert exit_(0, -signal.SIGKILL).is_certain
    assert not exit_(0, -signal.SIGABRT).is_certain  # gloo aborts a rank that receives more than it expects


def test_of_two_exceptions_the_first_in_time_is_the_cause():
    exits = [exit_(0, failure=failure(0, at=2.0)), exit_(1, failure=failure(1, at=1.0))]
    assert root_cause(exits).rank == 1


def test_rank_that_was_asked_to_stop_explains_nothing():
    exits = [exit_(0, -15, stopped=True), exit_(1, failure=failure(1))]
    assert root_cause(exits).rank == 1


def test_torchs_messages_of_a_lost_peer_are_known():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:19634")
    assert describe_failure(lost, 0).peer_lost
    assert not describe_failure(ValueError("Connection closed by peer"), 0).peer_lost


def test_second_failure_gives_up_and_names_the_rank():
    exits = [exit_(0, 0), exit_(1, -9)]
    limits = {"max_restarts": 1, "stop_requested": False}
    assert decide(exits, restarts=0, **limits) == Restart(attempt=1, cause=exits[1])
    assert decide(exits, restarts=1, **limits) == GiveUp(cause=exits[1])


def test_bad_input_is_not_tried_again():
    bad = Failure(rank=0, host="h", at=0, kind="E", message="m", traceback="t", exit_code=2, peer_lost=False)
    exits = [exit_(0, 2, failure=bad)]
    assert isinstance(decide(exits, max_restarts=5, restarts=0, stop_requested=False), GiveUp)


def test_stop_request_ends_with_what_the_ranks_saved():
    stopped = {"max_restarts": 5, "restarts": 0, "stop_requested": True}
    assert decide([exit_(0, 75, stopped=True), exit_(1, -15, stopped=True)], **stopped) == Finish(exit_code=75)
    assert decide([exit_(0, -15, stopped=True)], **stopped) == Finish()


def test_a_rank_that_the_launcher_ended_after_another_had_stopped_on_a_signal_has_not_failed():
    never = {"max_restarts": 3, "restarts": 0, "stop_requested": False}
    stopped = exit_(0, 75, failure=failure(0))
    assert decide([stopped, exit_(1, -15, stopped=True)], **never) == Finish(exit_code=75)
    assert isinstance(decide([stopped, exit_(1, -15)], **never), Restart)
    assert isinstance(decide([exit_(0, 75, stopped=True), exit_(1, -9)], **never), Restart)


def test_ranks_stopped_for_no_fault_of_theirs_are_not_a_success():
    assert isinstance(decide([exit_(0, -15, stopped=True)], max_restarts=0, restarts=0, stop_requested=False), GiveUp)


def test_ranks_that_a_verdict_stopped_are_started_again_as_often_as_allowed():
    exits, limits = [exit_(0, -15, stopped=True), exit_(1, -9, stopped=True)], {"max_restarts": 1, "by_verdict": True}
    assert decide(exits, restarts=0, stop_requested=False, **limits) == Restart(attempt=1, cause=None)
    assert decide(exits, restarts=1, stop_requested=False, **limits) == GiveUp(cause=None)
    assert decide(exits, restarts=0, stop_requested=True, **limits) == Finish()


def test_ranks_that_saved_when_a_verdict_stopped_them_have_failed_all_the_same():
    exits = [exit_(rank, 75, stopped=True) for rank in range(2)]
    assert isinstance(decide(exits, max_restarts=0, restarts=0, stop_requested=False, by_verdict=True), GiveUp)


def test_times_of_another_host_become_ages_and_times_of_this_one():
    exit_ = RankExit(rank=1, returncode=0, calls=LastCalls(left_at=time.time() - 50))
    [sent] = rebased([exit_])
    assert sent.calls.left_at == pytest.approx(50, abs=5)
    [received] = rebased([sent])
    assert received.calls.left_at == pytest.approx(exit_.calls.left_at, abs=5)
    assert rebased([RankExit(rank=2, returncode=0, calls=LastCalls())])[0].calls.left_at == 0.0
