"""Failures of ranks as JSON files, known errors with their fixes, and the environment variables that a run records."""

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


# Messages of torch, gloo, NCCL, MPI and MLX that report a lost peer, which is never a root cause. The pattern names the
# transport, because a connection of user code may be reset too.
PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|gloo.*(?:transport|Timed out|unbound_buffer)"
    r"|NCCL.*(?:remote process exited|unhandled system error|Abort)|Broken pipe.*store|recvValue failed"
    r"|DistNetworkError|DistStoreError|failed to recv|\[ring\] connection to a peer was lost"
    r"|waited \S+ s for the other ranks",
    re.DOTALL,
)
_PEER_ERRORS = (RuntimeError, ConnectionError)


NOT_SAVED = "and not saved"
NOT_UPLOADED = "but not uploaded"
"""Part of the message of a rank that was stopped and could not save a checkpoint."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one rank: its number, its host and the error."""

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
    """Whether the error only reports a lost connection to another rank."""
    code: str = ""
    """The error code of a ShardwiseError; empty for other exceptions and in files of version 1."""

    @property
    def first_line(self) -> str:
        """The first line of the message."""
        return (self.message.splitlines() or [""])[0]


def describe_failure(error: BaseException, rank: int) -> Failure:
    """Return the Failure record of an exception that ends this rank."""
    message = printable(str(error))
    exit_code, code = 1, ""
    if isinstance(error, ShardwiseError):
        exit_code, code = error.exit_code, error.code
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        at=time.time(),
        kind=type(error).__name__,
        message=message,
        traceback=printable("".join(traceback.format_exception(error))),
        exit_code=exit_code,
        peer_lost=isinstance(error, _PEER_ERRORS) and PEER_LOST.search(message) is not None,
        code=code,
    )


def write_failure(path: Path, failure: Failure) -> None:
    """Write `failure` to `path` as JSON, atomically."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(msgspec.json.encode(failure))
    except OSError:  # a full disk
        partial.unlink(missing_ok=True)
        raise
    partial.rename(path)


def read_failure(path: Path) -> Failure | None:
    """Read the failure of a rank; None if the file does not exist."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Failure)
    except FileNotFoundError:
        return None


# Known errors: the meaning and the fix of common messages of torch, NCCL and the kernel.


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """A known error message with its meaning and its fix."""

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

HOST_MEMORY_SPENT = "host memory ran out"
"""Part of the verdict on a rank that the kernel killed; `doctor run` recognizes the cause by this text."""
HOST_MEMORY_FIX = "use fewer ranks, fewer DataLoader workers, smaller batches, or a larger memory limit"
DISK_FULL = "disk full"

KNOWN_ERRORS = (
    _error(
        "same GPU twice",
        r"Duplicate GPU detected",
        "two ranks use the same GPU, but NCCL needs one GPU per rank",
        "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group, start no more ranks than"
        " GPUs, and do not set CUDA_VISIBLE_DEVICES under --gpus-per-task; with gloo, ranks can share a GPU",
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
        "the GPU is out of memory",
        "use a smaller micro-batch with gradient accumulation, recompute activations, or shard ('shardwise plan' lists"
        " plans that fit); nvidia-smi shows whether another process uses the GPU; set"
        " PYTORCH_ALLOC_CONF=expandable_segments:True if much memory is reserved but unallocated",
    ),
    _error(
        "host memory",
        r"DefaultCPUAllocator: (can't|not enough)|MemoryError|Cannot allocate memory|DataLoader worker.*signal: Killed",
        HOST_MEMORY_SPENT,
        HOST_MEMORY_FIX,
    ),
    _SHARED_MEMORY,
    _error(
        DISK_FULL,
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "free disk space (df -h, quota -s), keep fewer checkpoints, or use a run directory on another disk",
    ),
    _error(
        "address in use",
        r"EADDRINUSE|Address already in use|errno: 98\b",
        "another process listens on the rendezvous port of the ranks",
        "let the launcher choose the port (no --master-port, init_method='env://'), or find the process with"
        " ss -ltnp and end it",
    ),
    _error(
        "driver",
        r"driver on your system is too old|driver version is insufficient|forward compatibility was attempted"
        r"|Driver/library version mismatch|no kernel image is available|CUDA unknown error",
        "the NVIDIA driver or GPU is not compatible with this build of torch",
        "run 'shardwise doctor': install a torch built for the driver's CUDA, or a newer driver; after an update of the"
        " driver, reboot",
    ),
    _error(
        "no interface",
        r"no socket interface found|Unable to find (address|interface) for",
        "NCCL or gloo is set to use an interface that this machine does not have",
        "run 'shardwise doctor env'; unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or set an interface that"
        " 'ip -br addr' lists",
    ),
    _error(
        "collective mismatch",
        r"Received data size doesn't match expected size|Is there a distributed collective mismatch",
        "this rank received more bytes than its collective expects: two ranks made different calls",
        "call the same collectives in the same order on every rank, with equal shapes and dtypes; recorded calls"
        " (--hang-after above 0) show both source lines",
    ),
    _error(
        "peer lost",
        r"(gloo|nccl|store)[\s\S]*(Connection (closed|reset) by|remote process exited|Broken pipe)"
        r"|Connection (closed|reset) by[\s\S]*(gloo|nccl|store)|\[ring\] connection to a peer was lost",
        "this rank lost its connection to another rank or its machine",
        "check the rank that ended first, in the logs of this run and on its machine (dmesg, memory, preemption);"
        " this rank is not the cause",
    ),
    _error(
        "NCCL system error",
        r"unhandled system error|ncclSystemError",
        "a system call failed inside NCCL: network, shared memory or a limit",
        "run again with NCCL_DEBUG=INFO and read the last WARN of logs/rank*.nccl.*; 'shardwise doctor' checks"
        " /dev/shm, locked memory and interfaces",
    ),
)
"""In order of precedence: the first match wins, and the least specific errors come last."""


def translate(message: str, returncode: int = 1) -> KnownError | None:
    """Return the known error that matches the message of a rank or the signal that ended it; None without a match."""
    for error in KNOWN_ERRORS:
        if error.pattern.search(message):
            return error
    if returncode == -signal.SIGBUS:
        return _SHARED_MEMORY
    return None


# The environment variables that a run records: an allow-list without variables that may contain secrets.


_RECORDED = re.compile(
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
    """Return the variables of `environ` on the allow-list that contain no secret, sorted by name."""
    recorded = {}
    for name, value in sorted(environ.items()):
        is_secret = _SECRET.search(name) or _URL_WITH_PASSWORD.search(value)
        if _RECORDED.fullmatch(name) and not is_secret:
            recorded[name] = value
    return recorded


def write_variables(run: RunDirectory, environ: Mapping[str, str]) -> None:
    """Write environment.json: the recorded variables of `environ`, which all ranks of this machine share."""
    recorded = printable_fields(recorded_variables(environ))
    run.environment.write_bytes(msgspec.json.format(msgspec.json.encode(recorded), indent=1))
