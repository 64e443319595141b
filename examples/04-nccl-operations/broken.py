"""Eight mistakes that everybody makes once, each under its name; `nccl_debugging.md` shows how they are found."""

import argparse
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from ranks import Me, finish, start
from torch.nn.parallel import DistributedDataParallel


def steps() -> Iterator[int]:
    """Yield forty steps, a tenth of a second each."""
    for step in range(40):
        time.sleep(0.1)
        yield step


def slow_data(me: Me) -> None:
    """One rank waits for its data, and the others for that rank."""
    for step in steps():
        if me.rank == 1 and step == 5:
            time.sleep(1000)
        dist.all_reduce(torch.ones(4, device=me.device))


def skipped_batch(me: Me) -> None:
    """One rank leaves a batch out, and a collective with it."""
    for step in steps():
        loss, count = torch.ones(4, device=me.device), torch.ones(4, device=me.device)
        if not (me.rank == 1 and step == 5):
            dist.all_reduce(loss)
        dist.all_reduce(count)


def main_rank_only(me: Me) -> None:
    """Rank 0 broadcasts a result that no other rank receives."""
    for step in steps():
        if me.rank == 0 and step == 5:
            dist.broadcast(torch.ones(4, device=me.device), src=0)
        dist.all_reduce(torch.ones(4, device=me.device))


def last_batch(me: Me) -> None:
    """The last batch of one rank is smaller, and so is its tensor."""
    for step in steps():
        rows = 3 if me.rank == 1 and step == 5 else 4
        dist.all_reduce(torch.ones(rows, device=me.device))


def other_dtype(me: Me) -> None:
    """One rank counts in whole numbers, and gloo adds them up as if they were floats."""
    for step in steps():
        dtype = torch.int32 if me.rank == 1 and step == 5 else torch.float32
        dist.all_reduce(torch.ones(4, dtype=dtype, device=me.device))


def own_weights(me: Me) -> None:
    """One rank loads weights after DDP has made all equal."""
    model = DistributedDataParallel(torch.nn.Linear(4, 2).to(me.device))
    if me.rank == 0:
        model.module.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in steps():
        model(torch.ones(3, 4, device=me.device)).mean().backward()
        optimizer.step()


def own_gradients(me: Me) -> None:
    """The module inside of DDP is called, so nobody sums gradients, and every rank learns from its own batches."""
    model = DistributedDataParallel(torch.nn.Linear(4, 2).to(me.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps():
        optimizer.zero_grad()
        model.module(torch.ones(3, 4, device=me.device) * (step + me.rank)).mean().backward()
        optimizer.step()


def any_order(me: Me) -> None:
    """Two values are written to one place, and the last one stays: which one that is, nobody promises."""
    for _ in steps():
        place = torch.zeros(4, device=me.device)
        place.put_(torch.tensor([0, 0], device=me.device), torch.tensor([1.0, 2.0], device=me.device))
        dist.all_reduce(place)


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (
        slow_data,
        skipped_batch,
        main_rank_only,
        last_batch,
        other_dtype,
        own_weights,
        own_gradients,
        any_order,
    )
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mistake", choices=MISTAKES)
    mistake = MISTAKES[parser.parse_args().mistake]
    me = start()
    mistake(me)
    finish(me)
