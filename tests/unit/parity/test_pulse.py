"""Ranks without progress: which pauses end a rank, and how long compilers and other engines may take."""

import multiprocessing
import os
import time

import pytest

from shardwise.errors import RankFailedError
from shardwise.launcher.local.function import run_forked
from shardwise.parity.progress import PauseLimit, Pulse, pause_limit, read_stuck, watched
from shardwise.planner.settle import LocalDevice, settle

LIMIT = PauseLimit(usual_s=0.5, first_s=60.0)
SHORT = PauseLimit(usual_s=1.0)


@pytest.fixture
def crowded_core():
    """One core that other processes keep busy, so that a process on it has an eighth of its time."""
    core = min(os.sched_getaffinity(0))
    others = [multiprocessing.Process(target=burn, args=(core, 600.0), daemon=True) for _ in range(7)]
    for other in others:
        other.start()
    yield core
    for other in others:
        other.kill()
        other.join()


def burn(core, seconds):
    """Use so many seconds of one core."""
    os.sched_setaffinity(0, {core})
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def limit_of(plan):
    spec, _, setting = plan.partition("+")
    overrides = dict([setting.split("=")]) if setting else {}
    settled = settle(spec, batch_size=8, world_size=2, device=LocalDevice(), overrides=overrides)
    return pause_limit(settled, 0.01, 600.0)


def test_a_plan_that_compiles_or_builds_an_engine_has_its_long_limit_for_first_steps_alone():
    assert limit_of("ddp") == PauseLimit(usual_s=15.0)
    for plan in ("ddp+compile=blocks", "zero1+engine=deepspeed"):
        limit, pulse = limit_of(plan), Pulse()
        assert limit.at(pulse) == 600.0  # it builds
        for kind in (40, 21, "evaluation"):
            pulse.begin(kind)
            assert limit.at(pulse) == 600.0
            pulse.end()
            assert limit.at(pulse) == 15.0
        pulse.begin(40)
        assert limit.at(pulse) == 15.0


def test_a_graph_that_is_compiled_again_may_take_as_long_as_the_first_time():
    pulse = Pulse()
    pulse.end()
    pulse.longest_s = 20.0
    assert limit_of("ddp+compile=blocks").at(pulse) == 40.0
    assert limit_of("ddp").at(pulse) == 15.0


def test_a_rank_that_hangs_in_a_later_step_ends_after_one_that_took_as_long_in_the_first(tmp_path):
    def train(rank):
        pulse = Pulse()
        with watched(pulse, LIMIT, rank, tmp_path):
            pulse.begin(40)
            time.sleep(3 * LIMIT.usual_s)  # a compiler at work
            pulse.end()
            (tmp_path / "second").touch()
            pulse.begin(40)
            time.sleep(3600)

    with pytest.raises(RankFailedError):
        run_forked(train, 1, timeout_s=60)
    (stuck,) = read_stuck(tmp_path)
    assert (tmp_path / "second").exists()
    assert f"{__file__}:" in stuck.place
    assert stuck.pause_s > 4 * LIMIT.usual_s  # twice the longest pause so far, less what other processes took of it


def test_neither_a_rank_that_gets_no_core_nor_one_that_waits_for_it_is_stuck(tmp_path, crowded_core):
    def train(rank):
        began = time.monotonic()
        with watched(Pulse(), SHORT, rank, tmp_path):
            if rank == 0:
                burn(crowded_core, 0.4)
                (tmp_path / "done").touch()
            while not (tmp_path / "done").exists():
                time.sleep(0.01)
        return time.monotonic() - began

    assert min(run_forked(train, 2, timeout_s=120)) > 1.5 * SHORT.usual_s
    assert not read_stuck(tmp_path)
