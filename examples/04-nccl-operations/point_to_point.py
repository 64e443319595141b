"""From one rank to another: blocking, non-blocking, tags, any source, a ring without deadlock, batches.

    torchrun --nproc_per_node=2 point_to_point.py
    torchrun --nproc_per_node=2 point_to_point.py --deadlock

`--deadlock` also runs the ring that everybody writes first, in which all ranks send and nobody receives, and shows
how it ends. Only the ranks that are named take part; the others continue.
"""

import argparse
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import Me, draw, finish, print_rank0, start
from torch.testing import assert_close

Shift = Callable[[Me, torch.Tensor, torch.Tensor], None]
"""Send a tensor to the right neighbour while one comes from the left (communicates, on every rank)."""


def send_recv(me: Me) -> None:
    """Rank 0 to rank 1, blocking: send returns when the tensor may be changed again, recv when it is there."""
    # <send_recv>
    tensor = torch.tensor([1, 2, 3], device=me.device) if me.rank == 0 else me.zeros(3)  # int64 on both sides
    before = tensor.clone()
    if me.rank == 0:
        dist.send(tensor, dst=1)
    elif me.rank == 1:
        dist.recv(tensor, src=0)
    # </send_recv>
    if me.rank <= 1:
        assert tensor.tolist() == [1, 2, 3]
    draw(me, "send(dst=1), recv(src=0)", before, tensor)


def isend_irecv(me: Me) -> None:
    """Rank 0 to rank 1, non-blocking: a request comes back at once, and the tensor is off limits until it is done."""
    tensor = torch.tensor([4, 5, 6], device=me.device) if me.rank == 0 else me.zeros(3)
    before = tensor.clone()
    if me.rank == 0:
        request = dist.isend(tensor, dst=1)
        request.wait()  # do other work before this line, not after it
    elif me.rank == 1:
        request = dist.irecv(tensor, src=0)
        request.wait()
        assert tensor.tolist() == [4, 5, 6]
    draw(me, "isend(dst=1), irecv(src=0)", before, tensor)


def tags(me: Me) -> None:
    """Two messages, received in the other order: tags identify them. NCCL ignores tags and matches by order."""
    if dist.get_backend() == "nccl":
        return print_rank0("nccl ignores tags: messages arrive in the order they were sent\n")
    received = None
    # <tags>
    if me.rank == 0:
        loss, step = torch.tensor([25]), torch.tensor([7])
        for request in [dist.isend(loss, dst=1, tag=1), dist.isend(step, dst=1, tag=2)]:
            request.wait()
    elif me.rank == 1:
        step, loss = me.zeros(1), me.zeros(1)
        dist.recv(step, src=0, tag=2)  # sent second, received first
        dist.recv(loss, src=0, tag=1)
        received = [step, loss]
        assert [step.item(), loss.item()] == [7, 25]
    # </tags>
    return draw(me, "recv(tag=2), recv(tag=1)", [[25], [7]] if me.rank == 0 else None, received)


def irecv_tags(me: Me) -> None:
    """Both receives start at once, and the tags pair them: rank 1 may wait for them in any order."""
    if dist.get_backend() == "nccl":
        return None
    received = None
    # <irecv_tags>
    if me.rank == 0:
        dist.send(torch.tensor([25]), dst=1, tag=1)
        dist.send(torch.tensor([7]), dst=1, tag=2)
    elif me.rank == 1:
        step, loss = me.zeros(1), me.zeros(1)
        requests = [dist.irecv(step, src=0, tag=2), dist.irecv(loss, src=0, tag=1)]
        for request in requests:
            request.wait()
        received = [step, loss]
        assert [step.item(), loss.item()] == [7, 25]
    # </irecv_tags>
    return draw(me, "irecv(tag=2), irecv(tag=1)", [[25], [7]] if me.rank == 0 else None, received)


def any_source(me: Me) -> None:
    """Rank 0 takes what comes, from whomever: recv without src returns the sender. NCCL has no such thing."""
    if dist.get_backend() == "nccl":
        return print_rank0("nccl has no any-source receive: name the rank\n")
    received = None
    # <any_source>
    if me.rank == 0:
        received = {}
        for _ in range(me.size - 1):
            tensor = me.zeros(2)
            sender = dist.recv(tensor)  # no src: the first that is there
            received[sender] = tensor.tolist()
    else:
        dist.send(me.piece(me.rank), dst=0)
    # </any_source>
    if received is not None:  # in any order
        assert received == {rank: me.piece(rank).tolist() for rank in range(1, me.size)}
        received = dict(sorted(received.items()))
    return draw(me, "recv() of any source", me.piece(me.rank) if me.rank else None, received)


def irecv_any_source(me: Me) -> None:
    """Rank 0 starts a receive for every other rank and names none: whoever sends first fills the first buffer."""
    if dist.get_backend() == "nccl":
        return None
    received = None
    # <irecv_any_source>
    if me.rank == 0:
        buffers = [me.zeros(2) for _ in range(me.size - 1)]
        requests = [dist.irecv(buffer, tag=3) for buffer in buffers]  # no src
        for request in requests:
            request.wait()
        received = sorted(buffer.tolist() for buffer in buffers)
    else:
        dist.send(me.piece(me.rank), dst=0, tag=3)
    # </irecv_any_source>
    if me.rank == 0:
        assert received == [me.piece(rank).tolist() for rank in range(1, me.size)]
    return draw(me, "irecv() of any source", me.piece(me.rank) if me.rank else None, received)


def all_send_first(
    me: Me, outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup, patience: timedelta
) -> None:
    """The ring that hangs: every rank waits in send for a neighbour that waits in send."""
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    # <naive>
    dist.isend(outgoing, dst=right, group=group).wait(patience)  # dist.send(outgoing, dst=right), with a time-out
    dist.recv(incoming, src=left, group=group)
    # </naive>


def even_ranks_send_first(me: Me, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Blocking calls only: rank 1 receives first, so rank 0 is not stuck, so the last rank is not, and so on."""
    # <parity>
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    if me.rank % 2 == 0:
        dist.send(outgoing, dst=right)
        dist.recv(incoming, src=left)
    else:
        dist.recv(incoming, src=left)
        dist.send(outgoing, dst=right)
    # </parity>


def isend_then_recv(me: Me, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send without waiting, receive, then wait. Not on NCCL: there, unbatched calls run one after the other."""
    # <isend_recv>
    request = dist.isend(outgoing, dst=(me.rank + 1) % me.size)
    dist.recv(incoming, src=(me.rank - 1) % me.size)
    request.wait()  # only now may `outgoing` be changed
    # </isend_recv>


def batched(me: Me, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Hand all sends and receives over at once, in any order: the way for NCCL, where it is one kernel."""
    # <batched>
    operations = [
        dist.P2POp(dist.isend, outgoing, (me.rank + 1) % me.size),
        dist.P2POp(dist.irecv, incoming, (me.rank - 1) % me.size),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    # </batched>


RINGS: dict[str, Shift] = {
    "even ranks send first": even_ranks_send_first,
    "isend, then recv": isend_then_recv,
    "batch_isend_irecv": batched,
}


def ring_all_gather(me: Me, shift: Shift) -> list[torch.Tensor]:
    """Return all ranks' pieces, moved on by one neighbour size - 1 times: an all_gather (communicates)."""
    pieces = [me.zeros(2) for _ in range(me.size)]
    pieces[me.rank] = me.piece(me.rank)
    for hop in range(me.size - 1):
        mine, theirs = (me.rank - hop) % me.size, (me.rank - hop - 1) % me.size
        shift(me, pieces[mine], pieces[theirs])
    assert_close(pieces, [me.piece(rank) for rank in range(me.size)])
    return pieces


def deadlock(me: Me, seconds: float = 2.0) -> str:
    """Run the ring that hangs, with little patience, and return how it ended (gloo only, on every rank)."""
    group = dist.new_group()  # of its own: its connections are of no use after a time-out
    end = "nobody waited"
    try:
        all_send_first(me, me.piece(me.rank), me.zeros(2), group, timedelta(seconds=seconds))
    except RuntimeError as error:
        end = str(error).partition("] ")[2]
    ends = [""] * me.size
    dist.all_gather_object(ends, end, me.control)
    assert "nobody waited" not in ends
    # The first rank that gives up closes its connections, and the others see only that.
    return next(end for end in ends if end.startswith("Timed out"))


def main() -> None:
    parser = argparse.ArgumentParser(description="From one rank to another")
    parser.add_argument("--deadlock", action="store_true", help="also run the ring that hangs (gloo)")
    options = parser.parse_args()
    me = start()
    if me.size == 1:
        raise SystemExit("one rank has no peer: use --nproc_per_node=2")
    for example in (send_recv, isend_irecv, tags, irecv_tags, any_source, irecv_any_source):
        example(me)
    for name, shift in RINGS.items():
        if dist.get_backend() == "nccl" and shift is isend_then_recv:
            continue
        draw(me, f"ring, {name}", me.piece(me.rank), ring_all_gather(me, shift))
    if options.deadlock and dist.get_backend() == "gloo":
        print_rank0(f"ring, all send first: {deadlock(me)}")
    finish(me)


if __name__ == "__main__":
    main()
