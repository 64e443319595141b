"""Run directories as train writes them, of any size, without training."""

import json
import math
import random
import time

from shardwise.runs import RunDirectory
from shardwise.runs.recorder import Recorder

GIB = 1 << 30


def write(path, *events):
    """Append events to a file, as EventLog would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(event, separators=(",", ":")) + "\n" for event in events)


def empty_run(path):
    """Make the folders of a run."""
    for name in ("events", "logs", "errors"):
        (path / name).mkdir(parents=True)
    return RunDirectory(path)


def start_event(at, ranks, num_steps, hosts=1):
    per_host = max(1, ranks // hosts)
    placed = [
        {"rank": rank, "host": f"node{rank // per_host}", "device": f"cuda:{rank % per_host}", "pid": 4000 + rank}
        for rank in range(ranks)
    ]
    facts = [["plan", f"shard{ranks} (zero 3)", "given"], ["precision", "bf16", "default"]]
    return {
        "at": at,
        "kind": "start",
        "ranks": placed,
        "parameters": 8_030_000_000,
        "num_steps": num_steps,
        "facts": facts,
    }


def steps_event(at, first, losses, **fields):
    known = {"epoch": 0, "lr": 3e-4, "samples": 64 * len(losses), "counted": 1, "grad_norm": 1.0, "skipped": 0}
    return {"at": at, "kind": "steps", "first": first, "losses": losses, "seconds": 1.0, **known, **fields}


def attempt_event(at, nproc, number=0, **fields):
    pids = {str(rank): 4000 + rank for rank in range(nproc)}
    known = {"node": 0, "nodes": 1, "nproc": nproc, "world_size": nproc, "host": "node0", "launcher": 3999}
    return {"at": at, "kind": "attempt", "number": number, "ranks": pids, "target": "train.py", **known, **fields}


def loss_at(step, rng):
    return 1.7 + 9 * math.exp(-step / 900) + 0.9 * math.exp(-step / 25000) + rng.gauss(0, 0.03)


def large_run(path, *, ranks=64, steps=100_000, per_event=50, hosts=8, seed=0):
    """Write a run of many ranks that still runs, with a spike, saves, evaluations, a restart and a late rank."""
    run, rng = empty_run(path), random.Random(seed)
    events, began = [], time.time() - steps / per_event
    at, restart_at, resume_at = began, steps * 6 // 10, steps * 11 // 20
    write(run.launcher_events(), attempt_event(began - 9, ranks))
    events.append(start_event(began, ranks, steps * 5 // 4, hosts))
    first, has_failed = 0, False
    while first < steps:
        losses = [round(loss_at(step, rng), 5) for step in range(first, first + per_event)]
        if first <= steps // 3 < first + per_event:
            losses[per_event // 2] = 9.5
        at += 1.0
        memory = (61 + 3 * min(1, first / steps * 9)) * GIB
        norm = round(abs(rng.gauss(0.8, 0.15)) + 4 * math.exp(-first / 700), 4)
        events.append(
            steps_event(at, first, losses, seconds=rng.uniform(0.95, 1.1), memory_bytes=memory, grad_norm=norm)
        )
        first += per_event
        if first % (steps // 10) == 0:
            events.append({"at": at, "kind": "save", "step": first, "stall_s": 0.18, "bytes": 9 * GIB // ranks})
            value = round(loss_at(first, rng) + 0.06, 4)
            events.append({"at": at, "kind": "evaluation", "step": first, "epoch": 0, "values": {"loss": value}})
        if first >= restart_at and not has_failed:
            has_failed, first = True, resume_at
            cause = "rank 41 on node5 failed first: SIGKILL (usually the kernel when host memory runs out, or kill -9)"
            write(
                run.launcher_events(),
                {"at": at, "kind": "exit", "rank": 41, "code": -9, "stopped": False, "words": "SIGKILL"},
                {"at": at, "kind": "restart", "number": 1, "most": 3, "cause": cause},
                attempt_event(at + 2, ranks, 1),
            )
            events.append(start_event(at + 8, ranks, steps * 5 // 4, hosts))
    write(run.events(0), *events)
    lines = run.events(0).read_bytes()
    for rank in range(1, ranks):
        run.events(rank).write_bytes(lines)
    for rank in range(ranks):
        record(run, rank, steps, late=rank == 13)
        run.stdout(rank).write_text(f"rank {rank} is here\n")
        run.stderr(rank).write_text("")
    return run


def record(run, rank, step, *, late=False):
    """Write the ring of a rank that is in backward of `step`, or late: still waits for its data."""
    recorder = Recorder(run.recorder(rank))
    for phase in ("data",) if late else ("data", "forward", "backward"):
        recorder.mark(phase, step)
        time.sleep(0.001)
    recorder.close()
