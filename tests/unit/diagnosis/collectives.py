"""Calls and ranks for tests of the guard, in one line each."""

from shardwise.diagnosis.guard.hang import RankProgress, RankStatus, Wait
from shardwise.diagnosis.guard.stacks import Activity
from shardwise.runs.call_reader import Call
from shardwise.runs.calls import GroupKey, Operation

WORLD = GroupKey("0", 0, (0, 1, 2, 3))


def call(sequence=1, name="all_reduce", match="sum float32*4", site="/x/train.py:8", group=WORLD, **more):
    entered = more.pop("entered", 0.0)
    operation = Operation(name, more.pop("channel", ""), match, more.pop("text", match), more.pop("peer", -1))
    return Call(
        group, sequence, operation, site, entered, more.pop("waited", 0.0), more.pop("left", 0.0), backward=False
    )


def at(sequence, group=WORLD, channel="", *, by_torch=False):
    return RankProgress(group=group, channel=channel, sequence=sequence, by_torch=by_torch)


def waiting(rank, sequence=5, for_s=12.0, quiet_s=None, *, by_torch=False, **more):
    here = call(sequence, **more)
    return RankStatus(
        rank=rank,
        waits=(Wait(call=here, for_s=for_s, by_torch=by_torch),),
        progress=(at(sequence, here.group, here.what.channel, by_torch=by_torch),),
        newest=here,
        quiet_s=for_s if quiet_s is None else quiet_s,
    )


def away(rank, sequence=4, quiet_s=12.0, **more):
    more.setdefault("newest", call(sequence))
    return RankStatus(rank=rank, progress=(at(sequence),), quiet_s=quiet_s, **more)


def doing(kind="", *, moving=False, cores=0.0, bytes_per_s=0.0, function="load", place="/x/data.py:41", inside=""):
    return Activity(function, place, inside, kind, moving, cores, bytes_per_s)


def world(*statuses):
    return {status.rank: status for status in statuses}
