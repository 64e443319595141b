"""Collectives and messages as calls of MPI: which buffers go where, and what is left to do when they have arrived."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

import torch

from shardwise.engines.mpi.types import datatype_of, reduction_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardwise.engines.mpi.types import Reduction


@dataclass
class MpiCall:
    """What one operation of a process group asks of MPI."""

    said: str
    asked: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    """Methods of a communicator, each of which returns a request, and what they are given."""
    following: list[Callable[[MpiCall], None]] = field(default_factory=list)
    """What is done once these requests are complete, and adds to a second call: none of it when there is none."""
    after: list[Callable[[], Any]] = field(default_factory=list)
    """What is done to the tensors, in this order, once all requests are complete."""
    outputs: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    """Buffers that must outlive the requests."""

    def ask(self, method: str, *arguments: Any) -> None:
        """Add a method of the communicator to what is asked."""
        self.asked.append((method, arguments))

    def take_following(self) -> MpiCall | None:
        """Return what is to be asked next, None at the end."""
        if not self.following:
            return None
        second = MpiCall(self.said, after=self.after, outputs=self.outputs, kept=self.kept)
        for step in self.following:
            step(second)
        return second


class Calls:
    """Makes the calls of a group of `size` ranks; `mpi` is mpi4py's module."""

    def __init__(self, mpi: Any, rank: int, size: int) -> None:
        self._mpi = mpi
        self._rank = rank
        self._size = size
        self._direct = Direct(mpi, rank, size, self._buffer)

    def all_reduce(self, tensors: Sequence[Tensor], reduce_op: Any) -> MpiCall:
        """Reduce each of `tensors` in place, on every rank."""
        call = MpiCall("all_reduce", outputs=list(tensors))
        for tensor in tensors:
            how = reduction_of(tensor.dtype, reduce_op)
            if self._direct.takes(tensor, how):
                flat = _flat(tensor)
                self._direct.all_reduce(call, flat, how)
                _copy_back(call, flat, tensor)
                continue
            carried = self._carry(call, tensor, how)
            buffer, operation = self._buffer(carried, how.datatype), getattr(self._mpi, how.operation)
            call.ask("Iallreduce", self._mpi.IN_PLACE, buffer, operation)
            self._reduced(call, carried, tensor, how)
        return call

    def reduce(self, tensor: Tensor, reduce_op: Any, root: int) -> MpiCall:
        """Reduce `tensor` in place on `root`; elsewhere it stays as it is."""
        call = MpiCall(f"reduce to rank {root}", outputs=[tensor])
        how = reduction_of(tensor.dtype, reduce_op)
        carried = self._carry(call, tensor, how)
        buffer, operation = self._buffer(carried, how.datatype), getattr(self._mpi, how.operation)
        if self._rank == root:
            call.ask("Ireduce", self._mpi.IN_PLACE, buffer, operation, root)
            self._reduced(call, carried, tensor, how)
        else:
            call.ask("Ireduce", buffer, None, operation, root)
        return call

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Sequence[Tensor]]], reduce_op: Any) -> MpiCall:
        """For each (output, inputs): reduce `inputs`, one or one for every rank, and keep this rank's part."""
        call = MpiCall("reduce_scatter", outputs=[output for output, _ in pairs])
        for output, inputs in pairs:
            _check_parts(output, inputs, self._rank, self._size)
            how = reduction_of(output.dtype, reduce_op)
            _require_memory(output)
            if len(inputs) == 1 and self._direct.takes(inputs[0], how):
                self._direct.reduce_scatter(call, _flat(inputs[0]).tensor_split(self._size), output.detach(), how)
                continue
            whole = _joined(inputs, how.dtype)
            whole = _scaled(whole, how)
            part = _apart(_flat_output(output, how.dtype), whole)
            counts = [item.numel() for item in inputs] if len(inputs) > 1 else [output.numel()] * self._size
            send, receive = self._buffer(whole, how.datatype), self._buffer(part, how.datatype)
            operation = getattr(self._mpi, how.operation)
            call.kept += [whole, part]
            if len(set(counts)) == 1:
                call.ask("Ireduce_scatter_block", send, receive, operation)
            else:
                call.ask("Ireduce_scatter", send, receive, counts, operation)
            self._reduced(call, part, output, how)
        return call

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> MpiCall:
        """Copy each of `tensors` from `root` to every rank."""
        call = MpiCall(f"broadcast from rank {root}", outputs=list(tensors))
        for tensor in tensors:
            moved = _flat(tensor)
            call.kept.append(moved)
            call.ask("Ibcast", self._buffer(moved), root)
            if self._rank != root:
                _copy_back(call, moved, tensor)
        return call

    def all_gather(self, pairs: Sequence[tuple[Sequence[Tensor], Tensor]]) -> MpiCall:
        """For each (outputs, input): put every rank's input into `outputs`, one tensor or one for every rank."""
        call = MpiCall("all_gather", outputs=[output for outputs, _ in pairs for output in outputs])
        for outputs, given in pairs:
            _check_parts(given, outputs, self._rank, self._size)
            whole = self._room(call, outputs)
            sent = _apart(_flat(given), whole)
            call.kept.append(sent)
            counts = [output.numel() for output in outputs]
            if len(set(counts)) == 1:
                call.ask("Iallgather", self._buffer(sent), self._buffer(whole))
            else:
                call.ask("Iallgatherv", self._buffer(sent), self._parts(whole, counts))
        return call

    def gather(self, outputs: Sequence[Tensor], given: Tensor, root: int) -> MpiCall:
        """Put every rank's `given` into `outputs`, which only `root` has."""
        call = MpiCall(f"gather to rank {root}", outputs=list(outputs))
        if self._rank == root:
            _check_parts(given, outputs, self._rank, self._size)
        whole = self._room(call, outputs) if self._rank == root else None
        sent = _flat(given) if whole is None else _apart(_flat(given), whole)
        call.kept.append(sent)
        receive = None if whole is None else self._parts(whole, [output.numel() for output in outputs])
        call.ask("Igatherv", self._buffer(sent), receive, root)
        return call

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> MpiCall:
        """Put this rank's part of `inputs`, which only `root` has, into `output`."""
        call = MpiCall(f"scatter from rank {root}", outputs=[output])
        part, send = _flat_output(output, output.dtype), None
        if self._rank == root:
            _check_parts(output, inputs, self._rank, self._size)
            whole = _joined(inputs, output.dtype)
            part = _apart(part, whole)
            call.kept.append(whole)
            send = self._parts(whole, [item.numel() for item in inputs])
        call.kept.append(part)
        call.ask("Iscatterv", send, self._buffer(part), root)
        _copy_back(call, part, output)
        return call

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> MpiCall:
        """Send `inputs[r]` to rank r and put what it sends into `outputs[r]`; parts may be uneven."""
        call = MpiCall("all_to_all", outputs=list(outputs))
        room = self._room(call, outputs)
        whole = _apart(_joined(inputs, inputs[0].dtype), room)
        call.kept.append(whole)
        send = self._parts(whole, [item.numel() for item in inputs])
        receive = self._parts(room, [item.numel() for item in outputs])
        call.ask("Ialltoallv", send, receive)
        return call

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> MpiCall:
        """Exchange the parts of `given`, cut along its first dimension by the splits, evenly where there are none."""
        return self.all_to_all(
            list(output.split(list(output_splits) or _even(output, self._size))),
            list(given.split(list(input_splits) or _even(given, self._size))),
        )

    def barrier(self) -> MpiCall:
        """Return when every rank has called."""
        return MpiCall("barrier", asked=[("Ibarrier", ())])

    def send(self, tensor: Tensor, peer: int, tag: int) -> MpiCall:
        """Send `tensor` to rank `peer`."""
        moved = _flat(tensor)
        call = MpiCall(f"send to rank {peer}", outputs=[tensor], kept=[moved])
        call.ask("Isend", self._buffer(moved), peer, tag)
        return call

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> MpiCall:
        """Receive `tensor` from rank `peer`, None for any."""
        call = MpiCall("recv" if peer is None else f"recv from rank {peer}", outputs=[tensor])
        room = _flat_output(tensor, tensor.dtype)
        call.kept.append(room)
        call.ask("Irecv", self._buffer(room), self._mpi.ANY_SOURCE if peer is None else peer, tag)
        _copy_back(call, room, tensor)
        return call

    def _buffer(self, flat: Tensor, datatype: str = "") -> list[Any]:
        """Return what mpi4py takes for the memory of `flat`."""
        num_bytes = flat.numel() * flat.element_size()
        memory = self._mpi.memory.fromaddress(flat.data_ptr(), num_bytes)
        return [memory, getattr(self._mpi, datatype or datatype_of(flat))]

    def _parts(self, flat: Tensor, counts: list[int]) -> list[Any]:
        """Return what mpi4py takes for `flat` cut into one part for every rank."""
        memory, datatype = self._buffer(flat)
        return [memory, (counts, list(accumulate(counts, initial=0))[:-1]), datatype]

    def _carry(self, call: MpiCall, tensor: Tensor, how: Reduction) -> Tensor:
        carried = _scaled(_flat(tensor, how.dtype), how)
        call.kept.append(carried)
        return carried

    def _reduced(self, call: MpiCall, carried: Tensor, tensor: Tensor, how: Reduction) -> None:
        if how.averages:
            whole = not (carried.is_floating_point() or carried.is_complex())
            call.after.append(lambda: carried.div_(self._size, rounding_mode="trunc" if whole else None))
        _copy_back(call, carried, tensor)

    def _room(self, call: MpiCall, outputs: Sequence[Tensor]) -> Tensor:
        """Return one buffer for all of `outputs`, copied into them at the end unless it is their memory."""
        if len(outputs) == 1:
            room = _flat_output(outputs[0], outputs[0].dtype)
            call.kept.append(room)
            _copy_back(call, room, outputs[0])
            return room
        counts = [output.numel() for output in outputs]
        room = torch.empty(sum(counts), dtype=outputs[0].dtype)
        call.kept.append(room)
        for part, output in zip(room.split(counts), outputs, strict=True):
            _copy_back(call, part, output)
        return room


def _check_parts(part: Tensor, whole: Sequence[Tensor], rank: int, size: int) -> None:
    """Refuse what MPI would read or write past the end of, or take for other numbers than they are."""
    _check_dtypes(part, *whole)
    if len(whole) == 1 and size > 1:
        if whole[0].numel() != part.numel() * size:
            raise ValueError(f"{whole[0].numel()} elements are not {part.numel()} for each of {size} ranks")
    elif len(whole) != size or whole[rank].numel() != part.numel():
        raise ValueError(
            f"{len(whole)} tensors were given, and {size} ranks need one each, of which number {rank} has"
            f" {part.numel()} elements"
        )


def _check_dtypes(*tensors: Tensor) -> None:
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    if len(dtypes) > 1:
        raise ValueError(f"inputs and outputs are to be of one dtype, and were given {', '.join(dtypes)}")


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    flat = [_flat(tensor, dtype) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _even(tensor: Tensor, size: int) -> list[int]:
    if tensor.shape[0] % size:
        raise ValueError(f"{tensor.shape[0]} rows cannot be cut evenly for {size} ranks: pass split sizes")
    return [tensor.shape[0] // size] * size


def _flat(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the elements of `tensor` in a row: its own memory where that is possible, else a copy."""
    _require_memory(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.to(dtype or tensor.dtype).contiguous().view(-1)


def _require_memory(tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        kind, fix = (tensor.device.type, ".cpu()") if tensor.device.type != "cpu" else (layout, ".to_dense()")
        raise ValueError(f"backend 'mpi' carries dense tensors of the CPU, and was given one of {kind}: use {fix}")


def _scaled(flat: Tensor, how: Reduction) -> Tensor:
    return flat if how.factor is None else (flat * how.factor).to(flat.dtype)


def _flat_output(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return room for the elements of `tensor` in a row: its own memory where that is possible."""
    _require_memory(tensor)
    own = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and tensor.dtype == dtype
    return tensor.detach().view(-1) if own else torch.empty(tensor.numel(), dtype=dtype)


def _apart(flat: Tensor, other: Tensor) -> Tensor:
    """Return `flat`, or a copy where it shares memory with `other`: MPI must not read what it writes.

    FSDP2 gathers into a tensor of which its own shard is a part.
    """
    (first, first_bytes), (second, second_bytes) = ((x.data_ptr(), x.numel() * x.element_size()) for x in (flat, other))
    return flat.clone() if first < second + second_bytes and second < first + first_bytes else flat


def _copy_back(call: MpiCall, flat: Tensor, tensor: Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr() or flat.dtype != tensor.dtype:
        call.after.append(lambda: tensor.detach().copy_(flat.view(tensor.shape)))


# Large sums by messages: every rank adds up its own part of all tensors, then sends the sum to all.
#
# Open MPI 5 on 16 idle cores: its own all-reduce of 16 MB of float32 without waiting took 7.2 ms on two ranks and
# 10.4 on four, in this way 2.9 and 6.4; 64 MB 89 and 98 ms, in this way 16 and 31. Numbers of 16 bits travel as
# they are and are added up in 32, to be rounded once.


LARGE_BYTES = 1 << 20
"""From here on: 256 kB took no less in this way than in MPI's."""
MOST_RANKS = 16
"""All talk to all at once, which is no way for many."""
_NUM_TAGS = 1 << 14


class Direct:
    """Makes the messages of such sums in a group of `size` ranks; `buffer` gives what mpi4py takes for memory."""

    def __init__(self, mpi: Any, rank: int, size: int, buffer: Callable[[Tensor], Any]) -> None:
        self._rank = rank
        self._size = size
        self._peers = [peer for peer in range(size) if peer != rank]
        self._buffer = buffer
        # The last of MPI's tags, which no script uses: messages of the group's own share its communicator.
        self._last_tag = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
        self._numbers = count()

    def takes(self, tensor: Tensor, how: Reduction) -> bool:
        """Return whether a tensor is summed in this way: a question of what is the same on every rank."""
        return (
            1 < self._size <= MOST_RANKS
            and tensor.numel() * tensor.element_size() >= LARGE_BYTES
            and tensor.dtype.is_floating_point
            and how.operation == "SUM"
            and how.factor is None
        )

    def all_reduce(self, call: MpiCall, flat: Tensor, how: Reduction) -> None:
        """Ask for the sum of everybody's `flat`, in its place."""
        parts = flat.tensor_split(self._size)
        mine, tag = parts[self._rank], self._next_tag()

        def share(following: MpiCall) -> None:
            for peer in self._peers:
                following.ask("Irecv", self._buffer(parts[peer]), peer, tag)
                following.ask("Isend", self._buffer(mine), peer, tag)

        self.reduce_scatter(call, parts, mine, how)
        call.following.append(share)

    def reduce_scatter(self, call: MpiCall, parts: Sequence[Tensor], output: Tensor, how: Reduction) -> None:
        """Ask for the sum of this rank's part, of which `parts` has one for every rank, in `output`."""
        mine, tag = parts[self._rank], self._next_tag()
        received = [mine.new_empty(mine.numel()) for _ in self._peers]
        call.kept += [*parts, *received, output]
        for peer, room in zip(self._peers, received, strict=True):
            call.ask("Irecv", self._buffer(room), peer, tag)
            call.ask("Isend", self._buffer(parts[peer]), peer, tag)

        def add_up(_: MpiCall) -> None:
            total = received[0].to(how.dtype)
            for part in (*received[1:], mine):
                total.add_(part)
            if how.averages:
                total.div_(self._size)
            output.copy_(total.view(output.shape))

        call.following.append(add_up)

    def _next_tag(self) -> int:
        """Return a tag that no message under way has, the same on every rank, as all make their calls in one order."""
        return int(self._last_tag) - next(self._numbers) % _NUM_TAGS
