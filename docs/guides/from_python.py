"""What the commands do, as functions: what a cell of a notebook would contain."""

from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


# <function>
def largest(rows: int) -> float:
    """Run on every rank: each one computes on its own tensor, and all get the maximum."""
    with sw.world() as world:
        value = torch.full((rows,), float(world.rank)).sum()
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()


results = sw.launch(largest, 3, nproc=2)  # one result per rank: [3.0, 3.0]
# </function>
print("launch:", results)

# <commands>
report = sw.plan("gpt2-xl", cluster="4xA100-40GB", batch_size=64)
print("plan:", report.best.layout, "zero", report.best.zero)

report = sw.verify(str(EXAMPLES / "verify" / "llama.py"), plans="zero3", nproc=2)
print("verify: exit code", report.exit_code)

report = sw.train(str(EXAMPLES / "text.py"), "fsdp", nproc=2, set=("steps=2",))
print("train: exit code", report.exit_code)

report = sw.bench("comm", ("all_reduce",), nproc=2, sizes="4KiB", seconds=1)
print("bench: exit code", report.exit_code)

report = sw.doctor_env(nproc=2)
print("doctor env: exit code", report.exit_code)
# </commands>
