"""CPU seconds of the search on large clusters, and how many of the considered plans are predicted in full.

    python benchmarks/plan_search.py

Each search runs once to fill caches of imports, then three times; the least CPU time counts, which another
process on the machine disturbs less than the time of day.
"""

from __future__ import annotations

import argparse
import time

from figures import figure
from shardwise.planner.plan import plan

QUESTIONS = (
    ("llama3-405b", "16384xH100", 2048),
    ("llama3-405b", "16384xH100", 196_608),
    ("llama3-70b", "2048xH100", 12_288),
    ("llama-70b", "1024xH100", 1024),
)
"""Model, cluster and batch size; the second and the third have more than 200,000 candidates."""
MANY = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run every search once")
    repeats = 1 if parser.parse_args().quick else 3
    plan("llama-7b", cluster="8xH100", history=False)
    print(f"{'model':<12} {'cluster':<12} {'batch':>8} {'considered':>10} {'predicted':>9} {'CPU s':>6}  chosen")
    slowest = 0.0
    for model, cluster, batch_size in QUESTIONS:
        seconds = []
        for _ in range(repeats):
            began = time.process_time()
            answer = plan(model, cluster=cluster, batch_size=batch_size, history=False).answer
            seconds.append(time.process_time() - began)
        least = min(seconds)
        counts = f"{answer.num_plans:>10,} {len(answer.candidates):>9,} {least:>6.2f}"
        print(f"{model:<12} {cluster:<12} {batch_size:>8,} {counts}  {answer.best.plan.layout}")
        if answer.num_plans >= MANY:
            slowest = max(slowest, least)
        if (model, batch_size) == ("llama3-405b", 2048):
            figure("plan.search.405b_on_16384", least, "cpu-seconds", at_most=2)
    figure("plan.search.200000_candidates", slowest, "cpu-seconds", at_most=5)


if __name__ == "__main__":
    main()
