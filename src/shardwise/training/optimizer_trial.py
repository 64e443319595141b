"""The trial of an optimizer on shards before a run: two forked CPU ranks step small tensors in the parameters' places.

`make_optimizer` tries every optimizer on the shards of the run itself (parallel/optimizer_rules.py). Search and
preflight have no ranks yet, so the same trial runs here on two of its own, about 0.2 s for a job: each parameter
becomes a tensor of at most 16 elements a dimension, under its name and with its attributes, split as the plan splits
it. What two ranks show holds for more: an update either treats every element by itself, or DTensor brings the shards
together.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise.dist import local_world
from shardwise.errors import JobError, RankFailedError
from shardwise.job.optimizers import SGD, AdamW
from shardwise.launcher.local.fork import run_forked
from shardwise.parallel.optimizer_rules import check_optimizer, check_sharded_updates, trial_shape
from shardwise.parallel.parameter_rules import copy_attributes
from shardwise.parallel.tensor_rules import cut_dimension, styles_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.job.optimizers import OptimizerFactory

    Dims = dict[str, int | None]
    """Name of a parameter -> the dimension that is split, None for one that every rank has whole as a DTensor."""

_RANKS = 2
_TIMEOUT_S = 60.0


def try_on_shards(factory: OptimizerFactory, module: nn.Module, tensor_rules: Mapping[str, str] | None = None) -> None:
    """Refuse an optimizer that updates shards otherwise than whole parameters; `module` may be on the meta device.

    Parameters are split over rows as ZeRO does, or with `tensor_rules` as tensor parallelism does.
    """
    if isinstance(factory, AdamW | SGD) or dist.is_initialized():
        return  # ours treat every element by itself; in a world that runs, the build makes the trial on its own shards
    dims = _split_dims(module, tensor_rules)
    try:
        refusals = _on_ranks(lambda: _refusal(factory, module, dims))
    except RankFailedError:
        return  # a trial that cannot be run has shown nothing, and the build makes it again
    for refusal in refusals:
        if refusal is not None:
            raise refusal


def _split_dims(module: nn.Module, tensor_rules: Mapping[str, str] | None) -> Dims:
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if tensor_rules is None:
        return {name: 0 if parameter.ndim else None for name, parameter in trained}
    styles = styles_by_name(module, tensor_rules)
    dims: Dims = {}
    for name, _ in trained:
        owner, _, kind = name.rpartition(".")
        dims[name] = cut_dimension(module.get_submodule(owner), styles.get(owner), kind)
    return dims


def _refusal(factory: OptimizerFactory, module: nn.Module, dims: Dims) -> JobError | None:
    """Return what the trial refuses; None also where the optimizer cannot be made for small tensors."""
    mesh = init_device_mesh("cpu", (_RANKS,))
    named = [(name, _placed(module.get_parameter(name), mesh, dim)) for name, dim in dims.items()]
    try:
        optimizer = factory(named)
    except Exception:  # noqa: BLE001 - a factory may ask for the sizes of its own model; then the build makes the trial
        return None
    try:
        check_optimizer(optimizer)
        check_sharded_updates(optimizer)
    except JobError as error:
        return error
    return None


def _placed(like: nn.Parameter, mesh: DeviceMesh, dim: int | None) -> nn.Parameter:
    """Return a small parameter in the place of `like`, split along `dim`."""
    placement = Replicate() if dim is None else Shard(dim)
    small = torch.zeros(trial_shape(like), dtype=torch.float64)
    placed = nn.Parameter(distribute_tensor(small, mesh, [placement], src_data_rank=None))
    copy_attributes(vars(like), placed)
    return placed


def _on_ranks(call: Callable[[], Any]) -> list[Any]:
    """Return what `call` returns on each of two forked ranks of a process group on the CPU."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        store = Path(folder) / "store"

        def body(rank: int) -> Any:
            with local_world(store, rank, _RANKS, timeout_s=_TIMEOUT_S):
                return call()

        return run_forked(body, _RANKS, timeout_s=_TIMEOUT_S)
