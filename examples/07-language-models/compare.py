"""Compares the losses of runs step by step, and those of a run with plain PyTorch on the same rows.

python compare.py runs/whole runs/resumed      two runs of the same job
python compare.py runs/whole --plain           a run, and pretrain_plain.train on the rows of the job
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from pretrain import job
from pretrain_plain import BATCH_SIZE, STEPS, train


def losses_of(folder: Path) -> dict[int, float]:
    """Return the loss of each step in a folder that `shardwise train` or `pretrain_plain.py` wrote."""
    if (folder / "checkpoint.pt").exists():
        return dict(enumerate(torch.load(folder / "checkpoint.pt")["losses"]))
    losses = {}
    for line in (folder / "events" / "rank0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "steps":
            losses |= dict(enumerate(event["losses"], start=event["first"]))
    return losses


# <plain>
def losses_of_plain_pytorch() -> dict[int, float]:
    """Return the losses of `pretrain_plain.train` on one process, with the job's rows in place of its own."""
    rows = list(islice(job.data("train"), STEPS * BATCH_SIZE))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    losses = train(rows.__getitem__, argparse.Namespace(resume=False, save_every=0))
    dist.destroy_process_group()
    return dict(enumerate(losses))


# </plain>


def main() -> None:
    """Print the largest difference; end with exit code 1 if it is not a rounding error."""
    parser = argparse.ArgumentParser(description="Compare the losses of runs.")
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path, nargs="?", help="a second run")
    parser.add_argument("--plain", action="store_true", help="compare with plain PyTorch on the rows of the job")
    options = parser.parse_args()
    if options.plain == (options.other is not None):
        parser.error("pass a second run, or --plain")
    expected = losses_of(options.run)
    found = losses_of_plain_pytorch() if options.plain else losses_of(options.other)
    steps = sorted(set(expected) & set(found))
    for step in (steps[0], steps[-1]):
        print(f"step {step + 1:>2}  loss {expected[step]:.6f}  {found[step]:.6f}")
    error = max(abs(expected[step] - found[step]) for step in steps)
    print(f"{len(steps)} steps in common, losses differ by at most {error:.1e}")
    if error > 1e-5:
        raise SystemExit("this is not the same training")


if __name__ == "__main__":
    main()
