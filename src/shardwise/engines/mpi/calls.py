"""Translates collectives, send and receive into MPI calls: their buffers, and the work after they complete.

An MpiCall lists nonblocking methods of a communicator. Tensors that MPI cannot use in place (other dtypes, not
contiguous, overlapping) are copied to flat buffers first and copied back afterwards. Large sums over few ranks are sent
as point-to-point messages, which is faster than MPI's own nonblocking reduction (see `Direct`).
"""

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
    """One operation of a process group as nonblocking MPI calls."""

    name: str
    methods: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    """Methods of a communicator, each of which returns a request, with their arguments."""
    following: list[Callable[[MpiCall], None]] = field(default_factory=list)
    """Functions that run when these requests are complete and add methods to a second call; empty if there is none."""
    after: list[Callable[[], Any]] = field(default_factory=list)
    """Functions on the tensors that run, in this order, when all requests are complete."""
    outputs: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    """Buffers that must outlive the requests."""

    def add(self, method: str, *arguments: Any) -> None:
        """Add a method of the communicator."""
        self.methods.append((method, arguments))

    def second_call(self) -> MpiCall | None:
        """Return the call that follows this one; None if the operation needs no second call."""
        if not self.following:
            return None
        second = MpiCall(self.name, after=self.after, outputs=self.outputs, kept=self.kept)
        for step in self.following:
            step(second)
        return second


class Calls:
    """Builds the MPI calls of one rank in a group of `size` ranks; `mpi` is mpi4py's module."""

    def __init__(self, mpi: Any, rank: int, size: int) -> None:
        self._mpi = mpi
        self._rank = rank
        self._size = size
        self._direct = Direct(mpi, rank, size, self._buffer)

    def all_reduce(self, tensors: Sequence[Tensor], reduce_op: Any) -> MpiCall:
        """Reduce each of `tensors` in place on all ranks."""
        call = MpiCall("all_reduce", outputs=list(tensors))
        for tensor in tensors:
            how = reduction_of(tensor.dtype, reduce_op)
            if self._direct.supports(tensor, how):
                flat = _flat(tensor)
                self._direct.all_reduce(call, flat, how)
                _copy_back(call, flat, tensor)
                continue
            carried = self._carry(call, tensor, how)
            buffer, operation = self._buffer(carried, how.datatype), getattr(self._mpi, how.operation)
            call.add("Iallreduce", self._mpi.IN_PLACE, buffer, operation)
            self._reduced(call, carried, tensor, how)
        return call

    def reduce(self, tensor: Tensor, reduce_op: Any, root: int) -> MpiCall:
        """Reduce `tensor` in place on `root`; it does not change on other ranks."""
        call = MpiCall(f"reduce to rank {root}", outputs=[tensor])
        how = reduction_of(tensor.dtype, reduce_op)
        carried = self._carry(call, tensor, how)
        buffer, operation = self._buffer(carried, how.datatype), getattr(self._mpi, how.operation)
        if self._rank == root:
            call.add("Ireduce", self._mpi.IN_PLACE, buffer, operation, root)
            self._reduced(call, carried, tensor, how)
        else:
            call.add("Ireduce", buffer, None, operation, root)
        return call

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Sequence[Tensor]]], reduce_op: Any) -> MpiCall:
        """For each pair, reduce the inputs (one tensor or one per rank) and write this rank's shard to the output."""
        call = MpiCall("reduce_scatter", outputs=[output for output, _ in pairs])
        for output, inputs in pairs:
            _check_parts(output, inputs, self._rank, self._size)
            how = reduction_of(output.dtype, reduce_op)
            _require_memory(output)
            if len(inputs) == 1 and self._direct.supports(inputs[0], how):
                self._direct.reduce_scatter(call, _flat(inputs[0]).tensor_split(self._size), output.detach(), how)
                continue
            whole = _joined(inputs, how.dtype)
            whole = _scaled(whole, how)
            part = _without_overlap(_flat_output(output, how.dtype), whole)
            counts = [item.numel() for item in inputs] if len(inputs) > 1 else [output.numel()] * self._size
            send, receive = self._buffer(whole, how.datatype), self._buffer(part, how.datatype)
            operation = getattr(self._mpi, how.operation)
            call.kept += [whole, part]
            if len(set(counts)) == 1:
                call.add("Ireduce_scatter_block", send, receive, operation)
            else:
                call.add("Ireduce_scatter", send, receive, counts, operation)
            self._reduced(call, part, output, how)
        return call

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> MpiCall:
        """Copy each of `tensors` from `root` to every rank."""
        call = MpiCall(f"broadcast from rank {root}", outputs=list(tensors))
        for tensor in tensors:
            moved = _flat(tensor)
            call.kept.append(moved)
            call.add("Ibcast", self._buffer(moved), root)
            if self._rank != root:
                _copy_back(call, moved, tensor)
        return call

    def all_gather(self, pairs: Sequence[tuple[Sequence[Tensor], Tensor]]) -> MpiCall:
        """For each pair, gather every rank's input into the outputs (one tensor or one per rank)."""
        call = MpiCall("all_gather", outputs=[output for outputs, _ in pairs for output in outputs])
        for outputs, given in pairs:
            _check_parts(given, outputs, self._rank, self._size)
            whole = self._output_buffer(call, outputs)
            sent = _without_overlap(_flat(given), whole)
            call.kept.append(sent)
            counts = [output.numel() for output in outputs]
            if len(set(counts)) == 1:
                call.add("Iallgather", self._buffer(sent), self._buffer(whole))
            else:
                call.add("Iallgatherv", self._buffer(sent), self._parts(whole, counts))
        return call

    def gather(self, outputs: Sequence[Tensor], given: Tensor, root: int) -> MpiCall:
        """Gather every rank's `given` into `outputs`, which only `root` has."""
        call = MpiCall(f"gather to rank {root}", outputs=list(outputs))
        if self._rank == root:
            _check_parts(given, outputs, self._rank, self._size)
        whole = self._output_buffer(call, outputs) if self._rank == root else None
        sent = _flat(given) if whole is None else _without_overlap(_flat(given), whole)
        call.kept.append(sent)
        receive = None if whole is None else self._parts(whole, [output.numel() for output in outputs])
        call.add("Igatherv", self._buffer(sent), receive, root)
        return call

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> MpiCall:
        """Copy this rank's tensor of `inputs`, which only `root` has, into `output`."""
        call = MpiCall(f"scatter from rank {root}", outputs=[output])
        part, send = _flat_output(output, output.dtype), None
        if self._rank == root:
            _check_parts(output, inputs, self._rank, self._size)
            whole = _joined(inputs, output.dtype)
            part = _without_overlap(part, whole)
            call.kept.append(whole)
            send = self._parts(whole, [item.numel() for item in inputs])
        call.kept.append(part)
        call.add("Iscatterv", send, self._buffer(part), root)
        _copy_back(call, part, output)
        return call

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> MpiCall:
        """Send `inputs[r]` to rank r and receive from it into `outputs[r]`; sizes may differ."""
        call = MpiCall("all_to_all", outputs=list(outputs))
        buffer = self._output_buffer(call, outputs)
        whole = _without_overlap(_joined(inputs, inputs[0].dtype), buffer)
        call.kept.append(whole)
        send = self._parts(whole, [item.numel() for item in inputs])
        receive = self._parts(buffer, [item.numel() for item in outputs])
        call.add("Ialltoallv", send, receive)
        return call

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> MpiCall:
        """Exchange slices of `given`, split along dim 0 by `input_splits`; empty splits mean an even split."""
        return self.all_to_all(
            list(output.split(list(output_splits) or _even(output, self._size))),
            list(given.split(list(input_splits) or _even(given, self._size))),
        )

    def barrier(self) -> MpiCall:
        """Return the call of a barrier, which completes when every rank has made it."""
        return MpiCall("barrier", methods=[("Ibarrier", ())])

    def send(self, tensor: Tensor, peer: int, tag: int) -> MpiCall:
        """Send `tensor` to rank `peer`."""
        moved = _flat(tensor)
        call = MpiCall(f"send to rank {peer}", outputs=[tensor], kept=[moved])
        call.add("Isend", self._buffer(moved), peer, tag)
        return call

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> MpiCall:
        """Receive `tensor` from rank `peer`; None means any rank."""
        call = MpiCall("recv" if peer is None else f"recv from rank {peer}", outputs=[tensor])
        buffer = _flat_output(tensor, tensor.dtype)
        call.kept.append(buffer)
        call.add("Irecv", self._buffer(buffer), self._mpi.ANY_SOURCE if peer is None else peer, tag)
        _copy_back(call, buffer, tensor)
        return call

    def _buffer(self, flat: Tensor, datatype: str = "") -> list[Any]:
        """Return mpi4py's buffer specification for the memory of `flat`."""
        num_bytes = flat.numel() * flat.element_size()
        memory = self._mpi.memory.fromaddress(flat.data_ptr(), num_bytes)
        return [memory, getattr(self._mpi, datatype or datatype_of(flat))]

    def _parts(self, flat: Tensor, counts: list[int]) -> list[Any]:
        """Return mpi4py's buffer specification for `flat`, split into one slice per rank."""
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

    def _output_buffer(self, call: MpiCall, outputs: Sequence[Tensor]) -> Tensor:
        """Return one flat buffer for all of `outputs`, copied into them at the end unless it is their memory."""
        if len(outputs) == 1:
            buffer = _flat_output(outputs[0], outputs[0].dtype)
            call.kept.append(buffer)
            _copy_back(call, buffer, outputs[0])
            return buffer
        counts = [output.numel() for output in outputs]
        buffer = torch.empty(sum(counts), dtype=outputs[0].dtype)
        call.kept.append(buffer)
        for part, output in zip(buffer.split(counts), outputs, strict=True):
            _copy_back(call, part, output)
        return buffer


def _check_parts(part: Tensor, whole: Sequence[Tensor], rank: int, size: int) -> None:
    """Raise ValueError if sizes or dtypes do not match: MPI would access memory out of bounds or misread elements."""
    _check_dtypes(part, *whole)
    if len(whole) == 1 and size > 1:
        if whole[0].numel() != part.numel() * size:
            raise ValueError(f"expected {part.numel()} elements for each of {size} ranks, got {whole[0].numel()}")
    elif len(whole) != size:
        raise ValueError(f"expected one tensor for each of {size} ranks, got {len(whole)}")
    elif whole[rank].numel() != part.numel():
        raise ValueError(f"expected {part.numel()} elements in tensor {rank}, got {whole[rank].numel()}")


def _check_dtypes(*tensors: Tensor) -> None:
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    if len(dtypes) > 1:
        raise ValueError(f"inputs and outputs must have one dtype, got {', '.join(dtypes)}")


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    flat = [_flat(tensor, dtype) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _even(tensor: Tensor, size: int) -> list[int]:
    if tensor.shape[0] % size:
        raise ValueError(f"{tensor.shape[0]} rows cannot be split evenly over {size} ranks: pass split sizes")
    return [tensor.shape[0] // size] * size


def _flat(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `tensor` as a contiguous 1-d tensor: a view if possible, else a copy."""
    _require_memory(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.to(dtype or tensor.dtype).contiguous().view(-1)


def _require_memory(tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        kind, fix = (tensor.device.type, ".cpu()") if tensor.device.type != "cpu" else (layout, ".to_dense()")
        raise ValueError(f"backend 'mpi' supports dense CPU tensors only, got {kind}: use {fix}")


def _scaled(flat: Tensor, how: Reduction) -> Tensor:
    return flat if how.factor is None else (flat * how.factor).to(flat.dtype)


def _flat_output(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous 1-d buffer for the elements of `tensor`: a view if possible, else uninitialized memory."""
    _require_memory(tensor)
    own = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and tensor.dtype == dtype
    return tensor.detach().view(-1) if own else torch.empty(tensor.numel(), dtype=dtype)


def _without_overlap(flat: Tensor, other: Tensor) -> Tensor:
    """Return `flat`, or a copy if it overlaps `other`: MPI must not read and write the same memory.

    FSDP2 gathers into a tensor that contains this rank's own shard.
    """
    start, other_start = flat.data_ptr(), other.data_ptr()
    end, other_end = start + flat.numel() * flat.element_size(), other_start + other.numel() * other.element_size()
    overlaps = start < other_end and other_start < end
    return flat.clone() if overlaps else flat


def _copy_back(call: MpiCall, flat: Tensor, tensor: Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr() or flat.dtype != tensor.dtype:
        call.after.append(lambda: tensor.detach().copy_(flat.view(tensor.shape)))


# Large sums as point-to-point messages: every rank sums its own slice of all tensors, then sends the sum to all ranks.
#
# Open MPI 5 on 16 idle cores: its nonblocking all-reduce of 16 MB of float32 took 7.2 ms on two ranks and 10.4 ms on
# four, these messages 2.9 and 6.4 ms; for 64 MB 89 and 98 ms against 16 and 31 ms. 16-bit elements are sent as they are
# and summed in float32, so they are rounded once.


LARGE_BYTES = 1 << 20
"""Minimum size of a tensor for reduction by messages: at 256 kB they were not faster than MPI's own reduction."""
MOST_RANKS = 16
"""Maximum group size for reduction by messages: every rank exchanges messages with all other ranks at once."""
_NUM_TAGS = 1 << 14


class Direct:
    """Builds the messages of large sums in a group of `size` ranks; `buffer` returns mpi4py's buffer specification."""

    def __init__(self, mpi: Any, rank: int, size: int, buffer: Callable[[Tensor], Any]) -> None:
        self._rank = rank
        self._size = size
        self._peers = [peer for peer in range(size) if peer != rank]
        self._buffer = buffer
        # The largest tags, which scripts do not use: send and recv of the group share its communicator.
        self._last_tag = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
        self._numbers = count()

    def supports(self, tensor: Tensor, how: Reduction) -> bool:
        """Return whether a tensor is summed by messages; depends only on values that are equal on every rank."""
        return (
            1 < self._size <= MOST_RANKS
            and tensor.numel() * tensor.element_size() >= LARGE_BYTES
            and tensor.dtype.is_floating_point
            and how.operation == "SUM"
            and how.factor is None
        )

    def all_reduce(self, call: MpiCall, flat: Tensor, how: Reduction) -> None:
        """Add the sends and receives of an in-place all-reduce of `flat` to `call`."""
        parts = flat.tensor_split(self._size)
        mine, tag = parts[self._rank], self._next_tag()

        def share(following: MpiCall) -> None:
            for peer in self._peers:
                following.add("Irecv", self._buffer(parts[peer]), peer, tag)
                following.add("Isend", self._buffer(mine), peer, tag)

        self.reduce_scatter(call, parts, mine, how)
        call.following.append(share)

    def reduce_scatter(self, call: MpiCall, parts: Sequence[Tensor], output: Tensor, how: Reduction) -> None:
        """Add the sends and receives of a reduce-scatter of `parts`, one slice per rank, into `output` to `call`."""
        mine, tag = parts[self._rank], self._next_tag()
        received = [mine.new_empty(mine.numel()) for _ in self._peers]
        call.kept += [*parts, *received, output]
        for peer, buffer in zip(self._peers, received, strict=True):
            call.add("Irecv", self._buffer(buffer), peer, tag)
            call.add("Isend", self._buffer(parts[peer]), peer, tag)

        def sum_parts(_: MpiCall) -> None:
            total = received[0].to(how.dtype)
            for part in (*received[1:], mine):
                total.add_(part)
            if how.averages:
                total.div_(self._size)
            output.copy_(total.view(output.shape))

        call.following.append(sum_parts)

    def _next_tag(self) -> int:
        """Return a tag that no pending message uses; equal on every rank, since all make their calls in one order."""
        return int(self._last_tag) - next(self._numbers) % _NUM_TAGS
