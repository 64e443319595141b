"""Which environment variables a run may write down: by allow-list, and nothing that looks like a secret."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from shardwise.runs.printable import printable_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.runs.directory import RunDirectory

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


def told_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that explain a run and give nothing away, by name."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if _TOLD.fullmatch(name) and not _SECRET.search(name) and not _URL_WITH_PASSWORD.search(value)
    }


def write_variables(run: RunDirectory, environ: Mapping[str, str]) -> None:
    """Write environment.json: what of `environ`, which all ranks of this machine share, may be told."""
    run.environment.write_bytes(
        msgspec.json.format(msgspec.json.encode(printable_fields(told_variables(environ))), indent=1)
    )
