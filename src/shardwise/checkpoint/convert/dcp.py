"""A torch.distributed.checkpoint folder, as plain FSDP2 code writes it: model and optimizer, cut over any ranks."""

from __future__ import annotations

import io
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.convert.contents import form_from
from shardwise.checkpoint.convert.dcp_metadata import read_listing
from shardwise.checkpoint.convert.nested import gather, nest, sort_out
from shardwise.checkpoint.convert.torch_file import load_plain
from shardwise.checkpoint.disk import sync_folder
from shardwise.checkpoint.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from shardwise.checkpoint.convert.contents import Contents
    from shardwise.checkpoint.convert.dcp_metadata import Stored, StoredTensor


def read(path: Path) -> Contents:
    """Return what a folder holds; tensors are put together from their pieces when they are asked for."""
    listing = read_listing(path)
    forms = {
        key: form_from(".".join(map(str, key)), tensor.dtype, tensor.shape) for key, tensor in listing.tensors.items()
    }
    found = sort_out(forms, listing.values, lambda key: _load(path, listing.values[key]))
    return gather("dcp", found, forms, lambda key: _whole(path, listing.tensors[key]))


def write(contents: Contents, path: Path) -> list[str]:
    """Write a new folder with torch's own writer and return what it does not tell."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    nested, left_out = nest(contents, contents.read(list(contents.forms)), numbered=False)
    writer = FileSystemWriter(path, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process is no surprise here
            save(nested, storage_writer=writer, no_dist=True)
    except CheckpointException as error:  # derives from BaseException
        cause = next(iter(error.failures.values()), (error,))[0]
        raise CheckpointError(f"{path} cannot be written ({cause})", code="checkpoint.write-failed") from error
    sync_folder(path)
    return left_out


def _whole(folder: Path, tensor: StoredTensor) -> Tensor:
    result = torch.empty(tensor.shape, dtype=tensor.dtype)
    for offsets, shape, where in tensor.chunks:
        if not math.prod(shape):
            continue
        chunk = _load(folder, where)
        if not isinstance(chunk, torch.Tensor) or tuple(chunk.shape) != shape or chunk.dtype != tensor.dtype:
            raise DamagedError(
                f"{folder / where.file} holds something else at byte {where.offset}", code="checkpoint.chunk-mismatch"
            )
        target = result
        for dim, (offset, length) in enumerate(zip(offsets, shape, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(chunk.detach())
    return result


def _load(folder: Path, where: Stored) -> Any:
    path = folder / where.file
    try:
        with path.open("rb") as file:
            file.seek(where.offset)
            data = file.read(where.length)
    except (OSError, ValueError, OverflowError) as error:
        raise DamagedError(f"{path} cannot be read ({error})", code="checkpoint.read-failed") from None
    if len(data) != where.length:
        raise DamagedError(f"{path} ends before byte {where.offset + where.length}", code="checkpoint.file-truncated")
    return load_plain(io.BytesIO(data), str(path))
