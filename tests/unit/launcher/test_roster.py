"""Disasters scripted for the roster: what each node is sent, without a socket or a clock."""

import signal

import msgspec
import pytest
from diagnosis.collectives import call

from shardwise.launcher.local.supervise import SETTLE_S
from shardwise.launcher.nodes.membership import NodeLimits
from shardwise.launcher.nodes.messages import (
    Again,
    Failing,
    Hello,
    JoinRound,
    Leaving,
    NodeEnded,
    NodeReady,
    Note,
    Opened,
    Over,
    Refused,
    RoundJoined,
    Stop,
    Welcome,
)
from shardwise.launcher.nodes.roster import GATHER_S, Roster
from shardwise.launcher.policy import RankExit, root_cause
from shardwise.runs.call_reader import LastCalls
from shardwise.runs.calls import GroupKey
from shardwise.runs.failure import describe_failure

FACTS = {"shardwise": "1", "torch": "2.13.0", "command": "train.py"}


class Run:
    """A roster with a clock that stands still unless moved, and the messages of each node since the last look."""

    def __init__(self, least, most, **limits):
        self.now = 0.0
        self.roster = Roster(
            NodeLimits(least=least, most=most, **limits), facts=FACTS, host="a", welcome=Welcome(0, "/run"), now=0.0
        )
        self.sent = {}

    def join(self, host, node_rank=None, **facts):
        hello = Hello(host, node_rank, {**FACTS, **facts}, is_host=host == "a")
        node = self.roster.join(hello)
        if node != 0 and not isinstance(node, Refused):
            self.roster.receive(node, NodeReady(), self.now)
        return node

    def receive(self, node, message):
        self.roster.receive(node, message, self.now)

    def later(self, seconds):
        self.now += seconds
        self.roster.tick(self.now)

    def took(self, kind):
        """Return node -> message of this kind, of those that were sent since the last look."""
        for node, message in self.roster.take():
            self.sent.setdefault(node, []).append(message)
        found = {node: [m for m in messages if isinstance(m, kind)] for node, messages in self.sent.items()}
        self.sent = {node: [m for m in messages if not isinstance(m, kind)] for node, messages in self.sent.items()}
        return {node: messages[-1] for node, messages in found.items() if messages}


def exit_of(rank, returncode=0, *, stopped=False):
    return RankExit(rank=rank, returncode=returncode, stopped=stopped)


def running(least, most, count, **limits):
    """Return a run of `count` nodes whose first rendezvous round is complete."""
    run = Run(least, most, **limits)
    for node in range(count):
        run.join("abcdef"[node])
    run.receive(0, Opened(0, 4000))
    assert set(run.took(JoinRound)) == set(range(count))
    for node in range(count):
        run.receive(node, RoundJoined(0, tuple(range(count))))
    return run


def end(run, node, round_, *exits, lost=""):
    run.receive(node, NodeEnded(round_, exits, lost))


def test_nodes_are_welcomed_in_any_order_and_join_when_the_store_is_open():
    run = Run(2, 2)
    assert run.join("b", 1) == 1
    assert run.took(JoinRound) == {}
    assert run.join("a", 0) == 0
    run.receive(0, Opened(0, 4000))
    assert set(run.took(Welcome)) == {0, 1}
    assert run.took(JoinRound) == {node: JoinRound(0, 4000, 2, 2, 5.0, 0) for node in (0, 1)}


@pytest.mark.parametrize(
    ("host", "rank", "facts", "code", "values"),
    [
        ("b", 1, {"torch": "2.11.0"}, "rendezvous.nodes-differ", ("b has torch '2.11.0'", "(a) has '2.13.0'")),
        ("b", 1, {"command": "other.py"}, "rendezvous.nodes-differ", ("b has command 'other.py'",)),
        ("b", 0, {}, "rendezvous.node-rank-taken", ("--node-rank 0",)),
        ("b", 2, {}, "launch.node-rank-invalid", ("--node-rank on b", "--nnodes 2")),
    ],
)
def test_node_that_does_not_fit_is_refused_in_one_sentence(host, rank, facts, code, values):
    run = Run(2, 2)
    run.join("a")
    refusal = run.join(host, rank, **facts)
    assert refusal.code == code
    assert [value for value in values if value not in refusal.fact] == []
    assert refusal.fact in run.took(Note)[0].text


def test_second_node_with_the_same_rank_and_one_too_many_are_refused():
    run = Run(2, 2)
    run.join("a")
    run.join("b", 1)
    assert run.join("c", 1).code == "rendezvous.node-rank-taken"
    assert run.join("c").code == "rendezvous.too-many-nodes"


def test_run_ends_well_when_all_ranks_do():
    run = running(2, 2, 2)
    end(run, 0, 0, exit_of(0))
    assert run.took(Over) == {}
    end(run, 1, 0, exit_of(1))
    assert run.took(Over) == {0: Over(), 1: Over()}


def test_failure_stops_the_others_and_names_rank_and_node():
    run = running(2, 2, 2)
    run.receive(1, Failing(0, certain=True))
    run.later(0)
    assert run.took(Stop)[0].signal == 0
    end(run, 1, 0, exit_of(1, -9))
    end(run, 0, 0, exit_of(0, -15, stopped=True))
    over = run.took(Over)
    assert over[0] == over[1]
    assert (over[0].failed, over[0].cause.rank, over[0].cause.node_name) == (True, 1, "node 1 (b)")


def test_failure_that_another_may_explain_waits_a_little():
    run = running(2, 2, 2)
    run.receive(0, Failing(0, certain=False))
    run.later(SETTLE_S / 2)
    assert run.took(Stop) == {}
    run.later(SETTLE_S)
    assert set(run.took(Stop)) == {0, 1}


def test_failed_rank_is_started_again_as_often_as_allowed():
    run = running(2, 2, 2, max_restarts=1)
    for round_ in (0, 1):
        end(run, 0, round_, exit_of(0, -15, stopped=True))
        end(run, 1, round_, exit_of(1, 1))
        if round_ == 0:
            assert run.took(Again) == {0: Again(1), 1: Again(1)}
            run.receive(0, Opened(1, 4001))
            assert run.took(JoinRound)[1] == JoinRound(1, 4001, 2, 2, 5.0, 1)
            run.receive(0, RoundJoined(1, (0, 1)))
    assert run.took(Over)[0].failed


def test_lost_node_shrinks_an_elastic_run_without_using_a_restart():
    run = running(1, 2, 2)
    run.roster.lose(1, "silent for 5 s", run.now)
    assert run.took(Stop)[0].reason == "node 1 (b) is lost"
    end(run, 0, 0, exit_of(0, -15, stopped=True))
    assert run.took(Again) == {0: Again(1)}
    run.receive(0, Opened(1, 4001))
    assert run.took(JoinRound) == {0: JoinRound(1, 4001, 1, 1, 5.0, 0)}


def test_lost_node_ends_a_run_that_cannot_do_without_it():
    run = running(2, 2, 2)
    run.roster.lose(1, "its connection closed", run.now)
    end(run, 0, 0, exit_of(0, 1))
    over = run.took(Over)[0]
    assert over.failed
    assert over.lost == "node 1 (b) is lost: its connection closed; the run requires 2 nodes, got 1"


def test_loss_of_node_zero_ends_the_run_for_all():
    run = running(1, 3, 3)
    run.roster.lose(0, "its connection closed", run.now)
    assert {node: over.lost for node, over in run.took(Over).items()} == {
        1: "node 0 (a) is lost: its connection closed",
        2: "node 0 (a) is lost: its connection closed",
    }


def test_node_that_is_lost_before_the_rendezvous_is_waited_for_again():
    run = Run(2, 2)
    run.join("a")
    run.join("b", 1)
    run.receive(0, Opened(0, 4000))
    run.roster.lose(1, "its connection closed", run.now)
    end(run, 0, 0)
    assert run.took(Again) == {0: Again(1)}
    run.receive(0, Opened(1, 4001))
    run.join("b", 1)
    assert run.took(JoinRound)[1] == JoinRound(1, 4001, 2, 2, 5.0, 0)


def test_nodes_that_join_together_make_one_new_round():
    run = running(1, 3, 1)
    run.join("b")
    run.later(GATHER_S / 2)
    run.join("c")
    assert run.took(Stop) == {}
    run.later(GATHER_S)
    assert run.took(Stop)[0].signal == signal.SIGTERM
    end(run, 0, 0, exit_of(0, 75, stopped=True))
    assert set(run.took(Again)) == {0, 1, 2}
    run.receive(0, Opened(1, 4001))
    assert run.took(JoinRound)[2] == JoinRound(1, 4001, 3, 3, 5.0, 0)


def test_node_that_leaves_an_elastic_run_lets_the_others_continue():
    run = running(1, 2, 2)
    run.receive(1, Leaving(signal.SIGTERM))
    assert {node: stop.signal for node, stop in run.took(Stop).items()} == {0: 15, 1: 15}
    end(run, 0, 0, exit_of(0, 75, stopped=True))
    end(run, 1, 0, exit_of(1, 75, stopped=True))
    assert run.took(Over) == {1: Over(exit_code=75, interrupted=signal.SIGTERM)}
    assert run.took(Again) == {0: Again(1)}


def test_number_of_a_node_that_was_let_go_is_taken_until_it_hangs_up():
    run = running(1, 3, 2)
    run.receive(1, Leaving(signal.SIGTERM))
    for node in (0, 1):
        end(run, node, 0, exit_of(node, 75, stopped=True))
    assert set(run.took(Over)) == {1}
    assert run.join("c", 1).code == "rendezvous.node-rank-taken"
    assert run.join("c") == 2
    run.roster.lose(1, "its connection closed", run.now)
    assert run.join("d") == 1
    run.receive(0, Opened(1, 4001))
    assert set(run.took(JoinRound)) == {0, 1, 2}


def test_script_that_has_finished_does_not_run_again_because_a_node_joins():
    run = running(1, 3, 2)
    run.join("c")
    run.later(GATHER_S)
    assert set(run.took(Stop)) == {0, 1}
    end(run, 0, 0, exit_of(0))
    end(run, 1, 0, exit_of(1))
    assert run.took(Over)[0] == Over()


def test_script_that_saved_and_left_with_zero_when_asked_runs_again():
    run = running(1, 2, 1)
    run.join("b")
    run.later(GATHER_S)
    end(run, 0, 0, exit_of(0, 0, stopped=True))
    assert set(run.took(Again)) == {0, 1}


def test_nobody_is_asked_to_stop_for_a_newcomer_once_ranks_have_ended():
    run = running(1, 3, 2)
    end(run, 1, 0, exit_of(1))
    run.join("c")
    run.later(GATHER_S)
    assert run.took(Stop) == {}
    end(run, 0, 0, exit_of(0))
    assert run.took(Over)[0] == Over()


def test_loss_of_a_node_whose_ranks_are_done_does_not_harm_the_run():
    run = running(2, 2, 2)
    end(run, 1, 0, exit_of(1))
    run.roster.lose(1, "its connection closed", run.now)
    assert run.took(Stop) == {}
    end(run, 0, 0, exit_of(0))
    assert run.took(Over)[0] == Over()


def test_round_is_not_finished_by_some_of_its_nodes():
    run = running(1, 2, 2)
    run.receive(1, Leaving(signal.SIGTERM))
    run.roster.lose(1, "its connection closed", run.now)
    end(run, 0, 0, exit_of(0))
    assert run.took(Again) == {0: Again(1)}


def test_round_whose_ranks_never_started_everywhere_is_not_finished():
    run = running(1, 3, 3)
    run.receive(2, Leaving(signal.SIGTERM))
    end(run, 0, 0, exit_of(0))
    end(run, 1, 0)
    end(run, 2, 0, exit_of(1))
    assert run.took(Again) == {0: Again(1), 1: Again(1)}


@pytest.mark.parametrize(("least", "node"), [(2, 1), (1, 0)], ids=["too few left", "node 0"])
def test_stop_of_a_node_that_is_needed_stops_the_run(least, node):
    run = running(least, 2, 2)
    run.receive(node, Leaving(signal.SIGINT))
    end(run, 0, 0, exit_of(0, -15, stopped=True))
    end(run, 1, 0, exit_of(1, -15, stopped=True))
    assert {over.interrupted for over in run.took(Over).values()} == {signal.SIGINT}


def test_nodes_that_do_not_come_in_time_are_missed_by_name():
    run = Run(2, 2, join_s=60)
    run.join("a")
    run.later(61)
    assert run.took(Over)[0].lost == "fewer than 2 nodes joined in time: node 0 (a)"


def test_messages_about_an_earlier_round_are_too_late():
    run = running(1, 2, 2)
    run.roster.lose(1, "gone", run.now)
    end(run, 0, 0, exit_of(0, -15, stopped=True))
    run.took(Stop)
    run.receive(0, Opened(1, 4001))
    run.receive(0, RoundJoined(1, (0,)))
    run.receive(0, Failing(0, certain=True))
    run.later(1)
    assert run.took(Stop) == {}
    run.receive(0, Failing(1, certain=True))
    run.later(1)
    assert set(run.took(Stop)) == {0}


def test_a_verdict_that_stopped_the_ranks_is_a_failure_that_restarts_or_ends_the_run():
    run = running(2, 2, 2, max_restarts=1)
    for round_ in (0, 1):
        run.receive(0, NodeEnded(round_, (exit_of(0, -15, stopped=True),), "rank 1 sleeps", by_verdict=True))
        assert set(run.took(Stop)) <= {1}
        end(run, 1, round_, exit_of(1, -9, stopped=True))
        if round_ == 0:
            assert run.took(Again) == {0: Again(1), 1: Again(1)}
            run.receive(0, Opened(1, 4001))
            for node in range(2):
                run.receive(node, RoundJoined(1, (0, 1)))
    over = run.took(Over)
    assert set(over) == {0, 1}
    assert all(message.failed and message.lost == "rank 1 sleeps on node 0 (a)" for message in over.values())


def test_a_rank_that_left_its_process_group_is_the_cause_on_every_node():
    run = running(2, 2, 2)
    message = "gloo/transport/tcp/pair.cc: Connection closed by peer"
    failure = msgspec.structs.replace(describe_failure(RuntimeError(message), 0), at=5.0)
    lost = RankExit(rank=0, returncode=1, failure=failure)
    end(run, 0, 0, lost)
    end(run, 1, 0, RankExit(rank=1, returncode=-15, stopped=True, calls=LastCalls(left_at=4.0)))
    for over in run.took(Over).values():
        assert over.cause.rank == root_cause(over.exits).rank == 1


def test_an_abort_by_gloo_is_explained_by_the_last_calls_of_ranks_of_two_nodes():
    run = running(2, 2, 2)
    pair = GroupKey("0", 0, (0, 1))
    missed = call(4, group=pair, site="/x/a.py:10")
    log = ("Received data size doesn't match expected size.",)
    aborted = RankExit(rank=0, returncode=-6, log=log, calls=LastCalls(inside=(missed,), last=(missed,)))
    stopped = RankExit(
        rank=1, returncode=-15, stopped=True, calls=LastCalls(last=(call(3, group=pair),), line="/x/a.py:11")
    )
    end(run, 0, 0, aborted)
    end(run, 1, 0, stopped)
    over = run.took(Over)
    assert over[1].mismatch.startswith("rank 1 did not call all_reduce #4 (sum float32*4) at /x/a.py:10")
    assert "rank 1 was at /x/a.py:11" in over[0].mismatch
    assert [exit_.rank for exit_ in over[0].exits] == [over[0].cause.rank] == [0]
