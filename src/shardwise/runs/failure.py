"""Failures of ranks as JSON files, known errors with their fixes, and the variables that a run may store."""

from __future__ import annotations

import re
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shardwise.errors import ShardwiseError
from shardwise.runs.console import printable, printable_fields

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardwise.runs.directory import RunDirectory


# Messages of torch, gloo, NCCL, MPI and MLX that another rank is gone: never a root cause. Anchored on the transport,
# since a user's own socket may be reset too.
PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|gloo.*(?:transport|Timed out|unbound_buffer)"
    r"|NCCL.*(?:remote process exited|unhandled system error|Abort)|Broken pipe.*store|recvValue failed"
    r"|DistNetworkError|DistStoreError|failed to recv|\[ring\] connection to a peer was lost"
    r"|waited \S+ s for the other ranks",
    re.DOTALL,
)
_PEER_ERRORS = (RuntimeError, ConnectionError)


NOT_SAVED = "and not saved"
"""In the words of a rank that was asked to stop when its state could not be written."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's failure: which rank, where, which error."""

    rank: int
    host: str
    at: float
    """Seconds since the epoch."""
    kind: str
    """Name of the exception's class."""
    message: str
    traceback: str
    exit_code: int
    peer_lost: bool
    """The error only reports that another rank is gone."""
    code: str = ""
    """The condition by name if the error is one of shardwise's own; empty for any other, and in files from before."""


def describe_failure(error: BaseException, rank: int) -> Failure:
    """Turn an exception that ends this rank into a Failure."""
    message = printable(str(error))
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        at=time.time(),
        kind=type(error).__name__,
        message=message,
        traceback=printable("".join(traceback.format_exception(error))),
        exit_code=error.exit_code if isinstance(error, ShardwiseError) else 1,
        peer_lost=isinstance(error, _PEER_ERRORS) and PEER_LOST.search(message) is not None,
        code=error.code if isinstance(error, ShardwiseError) else "",
    )


def write_failure(path: Path, failure: Failure) -> None:
    """Write `failure` whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(msgspec.json.encode(failure))
    except OSError:  # a full disk
        partial.unlink(missing_ok=True)
        raise
    partial.rename(path)


def read_failure(path: Path) -> Failure | None:
    """Read a failure back, None when the rank left none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Failure)
    except FileNotFoundError:
        return None


# Common errors: what each means and what to do, found by the message of a failed rank.


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """One error and its translation."""

    name: str
    pattern: re.Pattern[str]
    """The message of torch, NCCL or the kernel."""
    means: str
    todo: str

    def __str__(self) -> str:
        return f"{self.means}: {self.todo}"


def _error(name: str, pattern: str, means: str, todo: str) -> KnownError:
    return KnownError(name=name, pattern=re.compile(pattern, re.IGNORECASE), means=means, todo=todo)


_SHARED_MEMORY = _error(
    "shared memory",
    r"killed by signal: Bus error|out of shared memory|unable to (open|write|allocate|resize).*(shared memory|/torch_)"
    r"|/dev/shm.*No space left|Error while creating shared memory segment",
    "shared memory (/dev/shm) is full",
    "see df -h /dev/shm; start the container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir with medium:"
    " Memory at /dev/shm), or use fewer DataLoader workers",
)

DISK_FULL = "disk full"

KNOWN_ERRORS = (
    _error(
        "same GPU twice",
        r"Duplicate GPU detected",
        "two ranks took the same GPU, and NCCL wants one for each",
        "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group, start no more ranks than"
        " GPUs, and leave CUDA_VISIBLE_DEVICES alone under --gpus-per-task; gloo can share one",
    ),
    _error(
        "unused parameters",
        r"Expected to have finished reduction in the prior iteration",
        "DDP waits for gradients of parameters that the loss did not use",
        "run once with TORCH_DISTRIBUTED_DEBUG=INFO to see their names, then use them, freeze them"
        " (requires_grad_(False)), or pass find_unused_parameters=True to DistributedDataParallel",
    ),
    _error(
        "device memory",
        r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU's memory is full",
        "use a smaller batch with accumulation, recompute activations, or shard ('shardwise plan' lists what fits);"
        " nvidia-smi shows whether another process holds some; PYTORCH_ALLOC_CONF=expandable_segments:True if much is"
        " reserved but unallocated",
    ),
    _error(
        "host memory",
        r"DefaultCPUAllocator: (can't|not enough)|MemoryError|Cannot allocate memory|DataLoader worker.*signal: Killed",
        "host memory ran out",
        "use fewer ranks, fewer DataLoader workers or smaller batches, or a larger memory limit",
    ),
    _SHARED_MEMORY,
    _error(
        DISK_FULL,
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "free space there (df -h, quota -s), keep fewer checkpoints, or name a run directory on another disk",
    ),
    _error(
        "address in use",
        r"EADDRINUSE|Address already in use|errno: 98\b",
        "another process listens on the port where ranks meet",
        "leave the port to the launcher (no --master-port, init_method='env://'), or find the process with"
        " ss -ltnp and end it",
    ),
    _error(
        "driver",
        r"driver on your system is too old|driver version is insufficient|forward compatibility was attempted"
        r"|Driver/library version mismatch|no kernel image is available|CUDA unknown error",
        "the NVIDIA driver or GPU and this torch do not fit each other",
        "run 'shardwise doctor': install a torch built for the driver's CUDA, or a newer driver; after an update of the"
        " driver, reboot",
    ),
    _error(
        "no interface",
        r"no socket interface found|Unable to find (address|interface) for",
        "NCCL or gloo is set to use an interface that this machine does not have",
        "run 'shardwise doctor env'; unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or name one of 'ip -br addr'",
    ),
    _error(
        "collective mismatch",
        r"Received data size doesn't match expected size|Is there a distributed collective mismatch",
        "this rank received more bytes than its collective expects: two ranks made different calls",
        "have every rank make the same collectives in the same order, with equal shapes and dtypes; recorded calls"
        " (--hang-after above 0) name both lines",
    ),
    _error(
        "peer lost",
        r"(gloo|nccl|store)[\s\S]*(Connection (closed|reset) by|remote process exited|Broken pipe)"
        r"|Connection (closed|reset) by[\s\S]*(gloo|nccl|store)|\[ring\] connection to a peer was lost",
        "another rank, or its machine, went away while this one talked to it",
        "look at the rank that ended first, in this run's logs and on its machine (dmesg, out of memory, preemption);"
        " this rank is not the cause",
    ),
    _error(
        "NCCL system error",
        r"unhandled system error|ncclSystemError",
        "a call to the system failed inside NCCL: network, shared memory or a limit",
        "run again with NCCL_DEBUG=INFO and read the last WARN of logs/rank*.nccl.*; 'shardwise doctor' looks at"
        " /dev/shm, locked memory and interfaces",
    ),
)
"""The order matters: the first match wins, and the least specific come last."""


def translate(message: str, returncode: int = 1) -> KnownError | None:
    """Return the known error in the message of a rank, or in the signal that ended it; None when it is none of them."""
    found = next((error for error in KNOWN_ERRORS if error.pattern.search(message)), None)
    return _SHARED_MEMORY if found is None and returncode == -signal.SIGBUS else found


# Which environment variables a run may write down: by allow-list, and nothing that looks like a secret.


_TOLD = re.compile(
    r"(CUDA|NVIDIA|CUBLAS|CUDNN|NCCL|GLOO|UCX|FI|UCC|TORCH|TORCHELASTIC|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|TRITON|ATEN"
    r"|OMP|GOMP|KMP|MKL|OPENBLAS|PET|DS|MASTER|GROUP|ROLE|OMPI_COMM_WORLD|OMPI_MCA|PMI|PMIX|SHARDWISE)_\w+"
    r"|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|LD_LIBRARY_PATH|LD_PRELOAD|MALLOC_ARENA_MAX"
    r"|PYTHON(PATH|HASHSEED|OPTIMIZE|UNBUFFERED|WARNINGS)"
    r"|SLURM_(ARRAY_)?(JOB|STEP|TASK)_?(ID|NAME|NODELIST|NUM_NODES|PARTITION)"
    r"|SLURM_(NNODES|NTASKS|NODEID|PROCID|LOCALID|TASKS_PER_NODE|CPUS_PER_TASK|GPUS\w*|JOB_GPUS|RESTART_COUNT)"
)
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASS|PWD|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|CERT", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s]*@")


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that explain a run and give nothing away, by name."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if _TOLD.fullmatch(name) and not _SECRET.search(name) and not _URL_WITH_PASSWORD.search(value)
    }


def write_variables(run: RunDirectory, environ: Mapping[str, str]) -> None:
    """Write environment.json: what of `environ`, which all ranks of this machine share, may be recorded."""
    run.environment.write_bytes(
        msgspec.json.format(msgspec.json.encode(printable_fields(recorded_variables(environ))), indent=1)
    )
