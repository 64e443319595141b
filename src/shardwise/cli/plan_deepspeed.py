"""`shardwise plan --to-deepspeed` and `--from-deepspeed`: a plan as DeepSpeed's JSON, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.runs.console import complain, say

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.planner.search.search import Answer
    from shardwise.plans.plan import DType, Plan


def read_deepspeed(
    path: Path, out: Path | None, *, num_ranks: int | None, batch_size: int | None, precision: DType | None
) -> None:
    """Write the plan that a DeepSpeed JSON describes to `out` or standard output, and say what it does not hold."""
    from shardwise.engines.deepspeed.from_json import read_json
    from shardwise.plans.toml import plan_to_toml

    reading = read_json(path, num_ranks=num_ranks, batch_size=batch_size, precision=precision)
    text = plan_to_toml(reading.plan)
    if out is None:
        say(text.rstrip())
    else:
        out.write_text(text)
        say(f"plan      {out}: {reading.plan.layout}, zero {reading.plan.zero}, for train --plan {out}")
    complain(f"job       batch_size={reading.plan.batch_size}")
    for note in reading.notes:
        complain(f"note      {note}")


def write_deepspeed(plan: Plan, path: Path, *, clip_norm: float | None, has_job: bool) -> None:
    """Write a plan as DeepSpeed's JSON, and say what that cannot hold; nvme gets a folder beside the file."""
    import msgspec

    from shardwise.engines.deepspeed.config import deepspeed_config, left_out

    config = deepspeed_config(plan, clip_norm=clip_norm, nvme_path=str(path.resolve().parent / "nvme"))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    complain(f"deepspeed {path}: stage {config['zero_optimization']['stage']}, {plan.layout.world_size} ranks")
    if not has_job:
        complain("note      gradient_clipping is 0.0, off: write the job's clip_norm there, if it has one")
    for sentence in left_out(plan):
        complain(f"left out: {sentence}")


def best_for_deepspeed(answer: Answer) -> Plan:
    """Return the best plan of a search that DeepSpeed's JSON can hold; another than the best is said."""
    from shardwise.engines.deepspeed.config import require_expressible
    from shardwise.errors import PlanError

    refusal = PlanError("no plan fits", code="plan.none-fits", fix="use a larger cluster")
    for candidate in answer.candidates:
        try:
            require_expressible(candidate.plan)
        except PlanError as error:
            refusal = error
            continue
        if candidate is not answer.best:
            complain(f"note      of the plans that DeepSpeed has words for, the best is {candidate.plan.layout}")
        return candidate.plan
    raise refusal
