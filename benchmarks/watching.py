"""Watching: what it takes to look at a run of 64 ranks and 100,000 steps, and whether it grows no faster than the run.

The run is written by the generator of the tests, a quarter of it and the whole; the view reads each from nothing, the
best of a few times in CPU time, and then looks again while nothing has changed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from figures import figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))

from runs.synthetic import large_run

from shardwise.monitor.server import increment
from shardwise.runs.state import RunState

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, STEPS = 64, 100_000
REPEATS, QUICK_REPEATS = 9, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = QUICK_REPEATS if parser.parse_args().quick else REPEATS
    with tempfile.TemporaryDirectory() as folder:
        quarter = large_run(Path(folder) / "quarter", ranks=RANKS, steps=STEPS // 4)
        whole = large_run(Path(folder) / "whole", ranks=RANKS, steps=STEPS)
        quarter_s = best(lambda: RunState(quarter).refresh_all(), repeats)
        whole_s = best(lambda: RunState(whole).refresh_all(), repeats)
        view = RunState(whole)
        view.refresh_all()
        first = increment(view, "")
        look_s = best(view.refresh, repeats)
        answer_s = best(lambda: msgspec.json.encode(increment(view, first.cursor)), repeats)
        print(f"{RANKS} ranks, {STEPS:,} steps: {whole.events(0).stat().st_size / 1e6:.2f} MB of events a rank")
        figure("watch.fold.seconds", whole_s, "s", at_most=1.0)
        figure("watch.fold.growth", whole_s / quarter_s, "x-for-4x-steps", at_most=5.0)
        figure("watch.look.ms", look_s * 1e3, "ms", at_most=20.0)
        figure("watch.answer.ms", answer_s * 1e3, "ms", at_most=20.0)
        figure("watch.first_answer.bytes", len(msgspec.json.encode(first)), "bytes", at_most=1e6)
        figure("watch.next_answer.bytes", len(msgspec.json.encode(increment(view, first.cursor))), "bytes", at_most=5e4)


def best(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


if __name__ == "__main__":
    main()
