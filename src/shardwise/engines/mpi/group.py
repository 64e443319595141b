"""A torch process group over mpi4py with all collectives, send and receive, each asynchronous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.engines.mpi.calls import Calls
from shardwise.engines.mpi.progress import MpiWork

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor

    from shardwise.dist.rendezvous import Store
    from shardwise.engines.mpi.calls import MpiCall
    from shardwise.engines.mpi.progress import MpiProgress

_ProcessGroup: Any = dist.ProcessGroup
"""ProcessGroup without its type stub, which has several signatures for each method; torch calls one of them."""
_SUM = dist.ReduceOp(dist.ReduceOp.SUM)


class MpiGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group with its own communicator, so that messages of different groups never mix."""

    def __init__(self, progress: MpiProgress, comm: Any, store: Store, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self._progress = progress
        self._store = store
        self._comm = comm
        self.limit_s = timeout.total_seconds()
        """Timeout of one operation."""
        self._calls = Calls(progress.mpi, comm.rank, comm.size)
        self._names = {"name": "", "desc": ""}

    def getBackendName(self) -> str:  # noqa: N802 - torch calls this name
        """Return the backend's name for users."""
        return "mpi"

    def setGroupName(self, name: str) -> None:  # noqa: N802 - as above
        """Set the group's name; torch's own attribute works for C++ backends only."""
        self._names["name"] = name

    def getGroupName(self) -> str:  # noqa: N802 - as above
        """Return the group's name."""
        return self._names["name"]

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - as above
        """Set the group's description."""
        self._names["desc"] = desc

    def getGroupDesc(self) -> str:  # noqa: N802 - as above
        """Return the group's description."""
        return self._names["desc"]

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Store:
        """Return the store of the group's rendezvous."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations."""
        self.limit_s = timeout.total_seconds()

    def allreduce(self, tensors: Any, opts: Any = None) -> MpiWork:
        """Reduce `tensors` in place on every rank; communicates over this group, like all methods below."""
        return self._run(self._calls.all_reduce(_listed(tensors), _op(opts)), opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> MpiWork:
        """Reduce a tensor in place on the root."""
        (tensor,) = _listed(tensors)
        return self._run(self._calls.reduce(tensor, _op(opts), _root(opts)), opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> MpiWork:
        """Copy the root's tensors to every rank."""
        return self._run(self._calls.broadcast(_listed(tensors), _root(opts)), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """Gather the tensors of all ranks on every rank; `outputs` has a list for each of `inputs`."""
        return self._run(self._calls.all_gather(_paired(outputs, _listed(inputs))), opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """Gather the tensors of all ranks on every rank; `outputs` has a list for each rank."""
        return self._run(self._calls.all_gather(_paired(zip(*outputs, strict=True), inputs)), opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """Gather the tensors of all ranks on every rank, concatenated in each of `outputs`."""
        return self._run(self._calls.all_gather(_paired([[output] for output in outputs], inputs)), opts)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> MpiWork:
        return self._run(self._calls.all_gather([([output], given)]), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """Gather the tensors of all ranks on the root."""
        (given,) = _listed(inputs)
        return self._run(self._calls.gather(outputs[0] if outputs else [], given, _root(opts)), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """Scatter the root's list of tensors, one to each rank."""
        (output,) = _listed(outputs)
        return self._run(self._calls.scatter(output, inputs[0] if inputs else [], _root(opts)), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """Reduce the lists `inputs` and keep this rank's tensor of each list."""
        return self._run(self._calls.reduce_scatter(_paired(_listed(outputs), inputs), _op(opts)), opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """Reduce each of `inputs` and keep this rank's shard of it."""
        pairs = _paired(outputs, [[given] for given in inputs])
        return self._run(self._calls.reduce_scatter(pairs, _op(opts)), opts)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> MpiWork:
        return self._run(self._calls.reduce_scatter([(output, [given])], _op(opts)), opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """Send `inputs[r]` to rank r and receive its tensor into `outputs[r]`."""
        return self._run(self._calls.all_to_all(outputs, inputs), opts)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> MpiWork:
        """Send each rank its rows of `given`, split along dim 0, and receive rows into `output`."""
        call = self._calls.all_to_all_single(output, given, output_splits or [], input_splits or [])
        return self._run(call, opts)

    def barrier(self, opts: Any = None) -> MpiWork:
        """Return a Work that completes when every rank has called barrier."""
        return self._run(self._calls.barrier(), opts)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> MpiWork:
        """Send a tensor to a rank of this group."""
        (tensor,) = _listed(tensors)
        return self._run(self._calls.send(tensor, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> MpiWork:
        """Receive a tensor from a rank of this group."""
        (tensor,) = _listed(tensors)
        return self._run(self._calls.receive(tensor, peer, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MpiWork:
        """Receive a tensor from any rank of this group."""
        (tensor,) = _listed(tensors)
        return self._run(self._calls.receive(tensor, None, tag))

    # Names in torch 2.13; 2.11 has only the names above.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def shutdown(self) -> None:
        """Free the communicator, collectively; skipped while work is pending and after a failure."""
        if self._progress.is_idle and not self._progress.is_broken:
            with self._progress.lock:
                self._comm.Free()

    def abort(self) -> None:
        """Do nothing: MPI cannot cancel a collective on one rank."""

    def _run(self, call: MpiCall, opts: Any = None) -> MpiWork:
        """Start `call`; every rank makes its calls in the same order."""

        def describe() -> str:
            return f"{call.name} of group {self.group_name}, rank {self.rank()} of {self.size()},"

        try:
            work = MpiWork(self._progress, call, self._post, describe=describe, limit_s=_limit_s(opts) or self.limit_s)
        except self._progress.mpi.Exception as error:
            raise dist.DistBackendError(f"{describe()} failed in MPI: {error}") from error
        self._progress.add(work)
        if getattr(opts, "asyncOp", True):
            self._progress.run_in_background()
        return work

    def _post(self, call: MpiCall) -> list[Any]:
        """Start all methods of `call` without another call in between; return their MPI requests."""
        with self._progress.lock:
            try:
                return [getattr(self._comm, method)(*arguments) for method, arguments in call.methods]
            except Exception:
                self._progress.keep_buffers(call)
                raise


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _paired(first: Any, second: Any) -> list[tuple[Any, Any]]:
    return list(zip(first, second, strict=True))


def _op(opts: Any) -> Any:
    if opts is None:
        return _SUM
    return getattr(opts, "reduceOp", opts)


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)


def _limit_s(opts: Any) -> float:
    timeout = getattr(opts, "timeout", None)
    return max(0.0, timeout.total_seconds()) if timeout is not None else 0.0
