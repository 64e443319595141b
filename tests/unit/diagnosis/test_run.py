"""A run directory becomes a story, a cause of the right kind, what was lost, and what to type."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from refusals import refuses
from shardwise.diagnosis.guard.guard import RANKS_CONTINUE, _describe_places
from shardwise.diagnosis.guard.hang import RankProgress, RankStatus, Wait, decide
from shardwise.diagnosis.run.cause import place_of
from shardwise.diagnosis.run.explain import check_lost, check_progress, describe_events, explain, next_commands
from shardwise.diagnosis.run.facts import Event, LauncherFacts, RunFacts, read_run
from shardwise.runs import RunDirectory
from shardwise.runs.call_reader import Call
from shardwise.runs.calls import CallRing, GroupKey, Operation, pack
from shardwise.runs.events import EventLog, LaunchLog
from shardwise.runs.failure import Failure, write_failure
from shardwise.runs.recorder import Mark

PATH = Path("runs/x")


def failure(rank, kind="ValueError", message="boom", *, exit_code=1, peer_lost=False):
    traceback = 'File "/home/me/train.py", line 12\nFile "/usr/lib/site-packages/torch/nn.py", line 9\n'
    return Failure(
        rank=rank,
        host="n1",
        at=time.time(),
        kind=kind,
        message=message,
        traceback=traceback,
        exit_code=exit_code,
        peer_lost=peer_lost,
    )


LOST_PEER = "Connection closed by peer gloo/transport"


def write_run(path, exits=(), *, verdict="", finish="", hang=""):
    """Write a run of two ranks as a launcher does: `exits` are (rank, code, failure, stopped)."""
    for folder in ("events", "logs", "errors"):
        (path / folder).mkdir(parents=True)
    run = RunDirectory(path)
    log = LaunchLog(run)
    log.attempt(0, {0: os.getpid(), 1: os.getpid()}, target="train.py", world_size=2, nodes=1)
    if hang:
        log.verdict(hang)
    for rank, code, failed, stopped in exits:
        if failed is not None:
            write_failure(run.error(rank), failed)
        log.exit(rank, code, stopped=stopped, failure=failed)
    if verdict:
        log.verdict(verdict)
    if finish:
        log.finish(finish, restarts=0)
    log.close()
    return run


ENDS = {
    "exception": (
        {"exits": [(1, 1, failure(1), False), (0, 1, failure(0, "RuntimeError", LOST_PEER, peer_lost=True), False)]},
        "exception: rank 1 on n1 failed first: ValueError: boom at /home/me/train.py:12",
    ),
    "signal": (
        {"exits": [(1, -11, None, False), (0, -15, None, True)]},
        "signal: rank 1 on HOST ended first: SIGSEGV (",
    ),
    "oom": (
        {"exits": [(1, -9, None, False)], "verdict": "rank 1 failed first: SIGKILL by the kernel, host memory ran out"},
        "oom: rank 1 on HOST ended first: SIGKILL",
    ),
    "refused input": (
        {"exits": [(0, 2, failure(0, "PlanError", "tp=3 does not divide", exit_code=2), False)]},
        "refused input: rank 0 on n1 failed first: PlanError: tp=3 does not divide",
    ),
    "preempted": (
        {"exits": [(0, 75, None, True), (1, 75, None, True)], "finish": "stopped"},
        "preempted: a stop was requested",
    ),
    "interrupted": (
        {"exits": [(0, -2, None, True), (1, -2, None, True)], "finish": "stopped"},
        "interrupted: a stop was requested",
    ),
    "early exit": ({"exits": [(1, 7, None, False)]}, "early exit: rank 1 on HOST ended first: exit code 7"),
    "hang": (
        {
            "exits": [(0, -15, None, True), (1, -15, None, True)],
            "hang": "rank 0 waits in all_reduce #2; rank 1 is at train.py:9",
            "verdict": "rank 0 waits in all_reduce #2; rank 1 is at train.py:9, so all ranks were stopped",
        },
        "hang: rank 0 waits in all_reduce #2; rank 1 is at train.py:9, so all ranks were stopped",
    ),
    "lost": (
        {"exits": [(0, -15, None, True)], "verdict": "the store ended with SIGKILL, so all ranks were stopped"},
        "lost: the store ended with SIGKILL",
    ),
}


STOPPED = [(0, -15, None, True), (1, -15, None, True)]
WAITS = "rank 0 waits in all_reduce #2 for 10 s; rank 1 is at train.py:9"


def test_a_hang_that_a_stop_request_ended_is_a_hang(tmp_path):
    write_run(tmp_path / "hung", STOPPED, hang=WAITS, finish="stopped")
    report = explain(read_run(tmp_path / "hung"))
    assert (report.state, report.kind, report.exit_code) == ("stopped", "hang", 3)
    assert WAITS in report.verdicts[0].fact
    assert "stacks" in report.verdicts[0].fix
    run = write_run(tmp_path / "continued", hang=WAITS)
    with contextlib.closing(EventLog(run.launcher_events())) as log:
        log.write("note", text=RANKS_CONTINUE)
        log.write("finish", state="stopped", restarts=0)
    assert explain(read_run(run.path)).kind == "interrupted"
    write_run(tmp_path / "differ", STOPPED, hang="ranks differ in the dtype at the same call", finish="stopped")
    assert explain(read_run(tmp_path / "differ")).kind == "interrupted"


def test_the_view_of_node_0_decides_after_node_1_was_disconnected(tmp_path):
    run = write_run(tmp_path / "run")
    with contextlib.closing(LaunchLog(run, 0)) as hub, contextlib.closing(LaunchLog(run, 1)) as other:
        for log, pids in ((hub, {0: 1}), (other, {1: 2})):
            log.attempt(0, pids, target="train.py", world_size=2, nodes=2)
        other.exit(1, -15, stopped=True, failure=None)
        other.verdict("node 0 (10.0.0.1), which runs the store, was silent for 5 s, so all ranks were stopped")
        other.finish("failed", restarts=0)
        hub.note("node 1 (b) is lost: silent for 5 s")
        hub.attempt(0, {0: os.getpid()}, target="train.py", world_size=1, nodes=1)
        assert explain(read_run(run.path)).state == "running"
        hub.exit(0, -15, stopped=True, failure=None)
        hub.finish("stopped", restarts=0)
    report = explain(read_run(run.path))
    assert (report.state, report.kind) == ("stopped", "interrupted")
    story = [line.partition(" s  ")[2] for line in report.story]
    assert "node 1 (b) is lost: silent for 5 s" in story
    assert story.count(f"rank 0 started on {os.uname().nodename}: train.py") == 2
    assert [line for line in story if line.startswith("node 1: ")] == [
        "node 1: verdict: node 0 (10.0.0.1), which runs the store, was silent for 5 s, so all ranks were stopped",
        "node 1: the run has failed",
    ]


def test_a_sentence_of_several_nodes_is_in_the_story_once():
    for place in ("", "; stacks of this node are in /x/stacks on host-{}"):
        found = [Event(float(n), "verdict", None, {"text": WAITS + place.format(n)}, node=n) for n in range(2)]
        assert len(describe_events(found)) == 1


@pytest.mark.parametrize("kind", ENDS)
def test_the_end_of_a_run_is_reported_by_its_kind(tmp_path, kind):
    how, expected = ENDS[kind]
    write_run(tmp_path / "run", **{"finish": "failed", **how})
    report = explain(read_run(tmp_path / "run"))
    assert report.kind == kind
    cause = report.verdicts[0]
    assert cause.name == "cause"
    assert expected.replace("HOST", os.uname().nodename) in cause.fact
    assert cause.fix
    assert cause.state == ("warn" if kind in {"preempted", "interrupted"} else "fail")
    assert report.commands[0] == "shardwise launch --nproc-per-node 2 train.py ..."


def test_a_rank_that_only_lost_its_peer_is_not_the_cause(tmp_path):
    write_run(tmp_path / "run", **ENDS["exception"][0], finish="failed")
    ranks = next(one for one in explain(read_run(tmp_path / "run")).verdicts if one.name == "ranks")
    assert ranks.fact == "rank 0 failed after it: they lost the connection to it"


def test_a_rank_that_destroyed_its_process_group_before_its_peers_is_the_cause(tmp_path):
    ring = CallRing(RunDirectory(tmp_path / "run").calls(1))
    ring.leave_world()
    lost = failure(0, "RuntimeError", LOST_PEER, peer_lost=True)
    write_run(
        tmp_path / "run", [(0, 1, structs.replace(lost, at=time.time()), False), (1, 0, None, True)], finish="failed"
    )
    report = explain(read_run(tmp_path / "run"))
    assert report.kind == "early exit"
    assert f"rank 1 on {os.uname().nodename} destroyed its process group" in report.verdicts[0].fact
    assert "number of steps" in report.verdicts[0].fix


def test_device_memory_is_oom_with_what_to_do(tmp_path):
    full = failure(1, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB")
    write_run(tmp_path / "run", [(1, 1, full, False)], finish="failed")
    report = explain(read_run(tmp_path / "run"))
    assert report.kind == "oom"
    assert "smaller micro-batch" in report.verdicts[0].fix


def test_a_finished_run_is_well_and_needs_nothing(tmp_path):
    write_run(tmp_path / "run", [(0, 0, None, False), (1, 0, None, False)], finish="finished")
    report = explain(read_run(tmp_path / "run"))
    assert (report.state, report.kind, report.commands) == ("finished", "", ())
    assert [verdict.state for verdict in report.verdicts] == ["ok"]


def test_a_run_whose_launcher_lives_is_running(tmp_path):
    write_run(tmp_path / "run")
    report = explain(read_run(tmp_path / "run"))
    assert report.state == "running"
    assert [verdict.state for verdict in report.verdicts] == ["ok"]
    assert report.commands == (f"shardwise watch {tmp_path / 'run'}",)


def test_a_run_whose_launcher_is_gone_is_lost(tmp_path):
    run = write_run(tmp_path / "run")
    gone = subprocess.Popen(["true"])
    gone.wait()
    text = run.launcher_events().read_text().replace(f'"launcher":{os.getpid()}', f'"launcher":{gone.pid}')
    run.launcher_events().write_text(text)
    report = explain(read_run(run.path))
    assert (report.state, report.kind) == ("lost", "lost")
    assert (
        f"the launcher (pid {gone.pid} on {os.uname().nodename}) and its ranks ended without a message"
        in report.verdicts[0].fact
    )


def test_only_ranks_of_this_machine_are_looked_at(tmp_path):
    run = write_run(tmp_path / "run")
    ring = CallRing(run.calls(0))
    group, what = ring.intern(GroupKey("0", 1, (0, 1))), ring.intern(Operation("barrier", "", "", ""))
    ring.issue(1, pack(group, what, ring.intern("train.py:3")))
    here = read_run(run.path).ranks
    assert [(rank, status.state) for rank, status in here.items()] == [(0, "running")]
    assert here[0].waits[0].call.site == "train.py:3"
    text = run.launcher_events().read_text()
    run.launcher_events().write_text(text.replace(f'"host":"{os.uname().nodename}"', '"host":"elsewhere"'))
    assert read_run(run.path).ranks == {}


def test_only_the_last_attempt_counts(tmp_path):
    run = write_run(tmp_path / "run", [(1, -9, None, False)])
    log = LaunchLog(run)
    log.restart(1, 3, "rank 1 failed first: SIGKILL")
    log.attempt(1, {0: 1, 1: 2}, target="train.py", world_size=2, nodes=1)
    for rank in (0, 1):
        log.exit(rank, 0, stopped=False, failure=None)
    log.finish("finished", restarts=1)
    log.close()
    report = explain(read_run(run.path))
    assert report.state == "finished"
    assert [line.partition(" s  ")[2] for line in report.story] == [
        f"ranks 0-1 started on {os.uname().nodename}: train.py",
        "rank 1 ended: SIGKILL (usually the kernel when host memory runs out, or kill -9)",
        "restart 1 of 3",
        f"ranks 0-1 started on {os.uname().nodename}: train.py, restart 1",
        "the run has finished",
    ]


def test_lines_that_are_torn_or_of_another_version_are_passed_over(tmp_path):
    run = write_run(tmp_path / "run", [(1, 1, failure(1), False)], finish="failed")
    with run.launcher_events().open("a") as file:
        file.write('{"at": 1, "kind": "exit"}\n{"at": "x"}\n[]\n{"at": 3, "kind": "fin')
    report = explain(read_run(run.path))
    assert report.kind == "exception"


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda path: None, "run.not-found"),
        (lambda path: path.touch(), "run.not-found"),
        (lambda path: path.mkdir(), "run.not-a-run"),
    ],
)
def test_a_path_without_a_run_is_refused_in_one_sentence(tmp_path, make, code):
    make(tmp_path / "x")
    with refuses(code, tmp_path / "x") as refused:
        read_run(tmp_path / "x")
    assert refused.value.exit_code == 2
    assert refused.value.fix


def test_the_place_of_a_failure_is_the_users_own_line():
    assert place_of(failure(0)) == "/home/me/train.py:12"


def job_facts(*, saved, done, **more):
    steps = Event(1.0, "steps", 0, {"first": 0, "losses": [0.0] * done})
    job = {"path": "/elsewhere/job.py", "attribute": "big", "overrides": {"optimizer.lr": "0.1"}}
    return RunFacts(path=PATH, now=2.0, events=(steps,) if done else (), job=job, saved=saved, **more)


@pytest.mark.parametrize(
    ("saved", "done", "state", "fact"),
    [
        (120, 147, "warn", "27 steps since the checkpoint of step 120"),
        (None, 12, "warn", "all 12 steps, because no checkpoint exists"),
        (147, 147, "ok", "nothing: the checkpoint of step 147 is the last step"),
        (None, 0, "ok", "nothing: no step was completed"),
    ],
)
def test_what_was_lost_since_the_last_checkpoint_is_counted(saved, done, state, fact):
    (verdict,) = check_lost(job_facts(saved=saved, done=done))
    assert (verdict.state, verdict.fact) == (state, fact)


def test_a_damaged_checkpoint_is_named_beside_what_was_lost():
    damaged = check_lost(job_facts(saved=5, done=5, damages=("step-00000010 is torn",)))[0]
    assert damaged.state == "warn"
    assert "step-00000010 is torn" in damaged.fact


def test_a_job_resumes_from_its_checkpoint_with_its_own_settings():
    (line,) = next_commands(job_facts(saved=5, done=6), "failed")
    assert line == "shardwise train /elsewhere/job.py:big --nproc 1 --set optimizer.lr=0.1 --resume runs/x"
    (line,) = next_commands(job_facts(saved=None, done=6), "failed")
    assert "--resume" not in line
    recorded = job_facts(saved=None, done=6, options=("--nnodes=2", "--node-rank=1", "--save-every=5"))
    (line,) = next_commands(recorded, "failed")
    options = "--nnodes=2 --node-rank=1 --save-every=5"
    assert line == f"shardwise train /elsewhere/job.py:big {options} --run-dir=runs/x --resume=auto"


def test_a_script_resumes_with_the_options_of_its_nodes():
    launchers = [LauncherFacts(node=node, nodes=2, host=f"h{node}", pids={node: 1}, target="t.py") for node in (0, 1)]
    line, *_ = next_commands(RunFacts(path=PATH, now=2.0, launchers=tuple(launchers)), "failed")
    options = "--nnodes 2 --node-rank NODE --master-addr h0"
    assert line == f"shardwise launch {options} --nproc-per-node 1 t.py ..."


WORLD = GroupKey("0", 1, (0, 1, 2))


def in_call(rank, sequence, *, for_s=0.0, quiet_s=60.0):
    """A rank that has issued `sequence` calls, and waits in the last for so long."""
    call = Call(WORLD, sequence, Operation("all_reduce", "", "", ""), "train.py:88", 1.0, 1.0, 0.0, backward=False)
    waits = (Wait(call=call, for_s=for_s),) if for_s else ()
    progress = (RankProgress(group=WORLD, channel="", sequence=sequence),)
    return RankStatus(rank=rank, waits=waits, progress=progress, newest=call, quiet_s=quiet_s)


def going(**more):
    return RunFacts(path=PATH, now=100.0, **more)


def test_a_rank_that_others_wait_for_is_named_with_the_collective():
    ranks = {0: in_call(0, 5, for_s=30), 1: in_call(1, 5, for_s=30), 2: in_call(2, 4)}
    verdict = next(one for one in check_progress(going(ranks=ranks)) if one.name == "hang")
    assert verdict.state == "fail"
    assert verdict.fact.startswith("ranks 0-1 wait in all_reduce #5 at train.py:88 for 30 s; rank 2 has not arrived")
    assert explain(going(ranks=ranks)).state == "stuck"


def test_the_host_of_a_missing_rank_is_named_on_several_nodes():
    ranks = {0: in_call(0, 5, for_s=30), 1: replace(in_call(1, 4), host="node-b")}
    assert "; rank 1 on node-b has not arrived" in decide(ranks, 10.0).text


def test_ranks_that_wait_for_ranks_of_another_node_may_be_stuck():
    elsewhere = LauncherFacts(node=1, nodes=2, host="node-b", pids={2: 1}, world_size=3)
    ranks = {0: in_call(0, 5, for_s=30), 1: in_call(1, 5, for_s=30)}
    facts = going(ranks=ranks, launchers=(elsewhere,), marks=marks(99.0, r0="backward"))
    verdict = next(one for one in check_progress(facts) if one.name == "hang")
    assert verdict.fact.startswith("ranks 0-1 wait in all_reduce #5 at train.py:88 for 30 s; rank 2")
    assert "node-b" in verdict.fix
    assert explain(facts).state == "stuck"


def test_collectives_of_ranks_that_ended_are_named_if_one_was_inside():
    left = [in_call(0, 5), in_call(1, 5)]
    assert _describe_places(left) == ""
    assert "rank 2 was in all_reduce #6" in _describe_places([*left, in_call(2, 6, for_s=1)])


def test_ranks_that_wait_for_a_moment_are_not_stuck():
    ranks = {0: in_call(0, 5, for_s=2), 1: in_call(1, 4, quiet_s=2.0)}
    assert "hang" not in {verdict.name for verdict in check_progress(going(ranks=ranks))}


def marks(last_at, **phases):
    return {int(name[1:]): Mark(last_at, phase, 12) for name, phase in phases.items()}


def test_phases_and_stragglers_are_reported_where_no_rank_progresses():
    found = check_progress(going(marks=marks(59.0, r0="backward", r1="backward", r2="data")))
    assert found[0].fact == "rank 2 in data of step 13 for 41 s; ranks 0-1 in backward of step 13 for 41 s"
    assert (found[1].name, found[1].state) == ("hang", "warn")
    assert found[1].fact == "rank 2 lags: still in data of step 13, and no rank has made progress for 41 s"


def test_ranks_that_got_on_lately_do_not_lag():
    found = check_progress(going(marks=marks(98.0, r0="backward", r1="data")))
    assert [verdict.state for verdict in found] == ["ok", "ok"]


def events(*kinds_and_texts):
    return tuple(Event(float(n), kind, None, {"text": text}) for n, (kind, text) in enumerate(kinds_and_texts))


def test_a_run_that_has_written_nothing_yet_has_no_age():
    assert [verdict.fact for verdict in check_progress(going())] == ["no rank has written an event yet"]


def test_a_verdict_of_a_guard_stands_until_it_is_taken_back():
    found = events(("verdict", "ranks 0 and 1 differ"))
    assert check_progress(going(events=found))[-1].fact == "ranks 0 and 1 differ"
    back = events(("verdict", "rank 0 waits"), ("note", "the ranks that waited continue"))
    assert [verdict.state for verdict in check_progress(going(events=back))] == ["ok"]


def test_the_story_has_the_last_of_many_steps_and_saves():
    many = [Event(float(n), "steps", 0, {"first": n, "losses": [1.0]}) for n in range(100)]
    many += [Event(50.5, "save", 0, {"step": 50}), Event(101.0, "exit", None, {"code": 0, "stopped": False})]
    many.append(Event(102.0, "finish", None, {"state": "finished"}))
    story = [line.partition(" s  ")[2] for line in describe_events(sorted(many, key=lambda event: event.at))]
    assert story == ["saving a checkpoint of step 50 starts", "step 100 is complete", "the run has finished"]


SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 1:
    raise ValueError("seven")
dist.all_reduce(total)
"""


def doctor(*arguments, cwd):
    command = [sys.executable, "-m", "shardwise", "doctor", "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=120)


def test_a_real_run_of_a_plain_script_is_explained(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "shardwise", "launch", "--nproc-per-node=2", "--log-dir=failed", "train.py"]
    assert subprocess.run(launch, capture_output=True, check=False, cwd=tmp_path, timeout=120).returncode == 1
    done = doctor("failed", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("state: failed (exception)\n")
    assert "failed first: ValueError: seven at train.py:7" in done.stdout


JOB = """
import pathlib, time
import shardwise as sw, torch
from torch.utils.data import TensorDataset

def data(split):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())

def fail(context):
    if context.step == 8 and pathlib.Path("fails").exists():
        while not pathlib.Path("first/checkpoints/latest").exists():  # it is saved in the background
            time.sleep(0.01)
        raise ValueError("seven")

job = sw.Job(model=lambda: torch.nn.Linear(4, 2), data=data, loss=sw.losses.cross_entropy,
             optimizer=sw.adamw(lr=1e-2), batch_size=8, steps=12, on_step=fail)
"""


@pytest.mark.prove
def test_a_real_run_of_a_job_is_explained_and_resumes_by_the_line_it_prints(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "fails").touch()
    train = [sys.executable, "-m", "shardwise", "train", "job.py", "--nproc=2", "--device=cpu"]
    train += ["--save-every=5", "--run-dir=first"]
    assert subprocess.run(train, capture_output=True, check=False, cwd=tmp_path, timeout=120).returncode == 1
    done = doctor("first", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert (done.returncode, report["kind"]) == (3, "exception")
    facts = {verdict["name"]: verdict["fact"] for verdict in report["verdicts"]}
    assert "ValueError: seven at job.py:14" in facts["cause"]
    assert facts["lost"] == "3 steps since the checkpoint of step 5"
    (line,) = report["commands"]
    options = "--nproc-per-node=2 --save-every=5 --device=cpu"
    assert line == f"shardwise train job.py {options} --run-dir=first --resume=auto"
    (tmp_path / "fails").unlink()
    again = [sys.executable, "-m", *line.split()]
    assert subprocess.run(again, capture_output=True, check=False, cwd=tmp_path, timeout=120).returncode == 0
    assert json.loads(doctor("first", "--json", cwd=tmp_path).stdout)["state"] == "finished"


def test_bad_input_is_one_sentence(tmp_path):
    done = doctor("nowhere", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "nowhere is not a directory" in done.stderr
