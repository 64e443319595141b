"""The state of an MLX step in torch's form: parameters, statistics, optimizer states and random generators."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import torch
import torch.distributed as dist
from mlx.utils import tree_map
from torch import nn as torch_nn

from shardwise.engines.mlx.functions import READY_MADE
from shardwise.engines.mlx.weights import assign, read_states, write_states
from shardwise.job.generators import host_states, seed_generators, set_host_states
from shardwise.parallel.optimizer import Optimized
from shardwise.training.step.module_step import LocalState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mlx import nn, optimizers
    from torch import Tensor

    from shardwise.engines.mlx.arrays import ArrayForm, MlxBatchNorm
    from shardwise.engines.mlx.functions import Gradients
    from shardwise.engines.mlx.weights import MlxGroup, Origin
    from shardwise.training.step.module_step import Forms

_STREAM = "mlx"
"""The name of MLX's random key in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """An MLX model with its optimizer."""

    model: nn.Module
    form: ArrayForm
    optimizer: optimizers.Optimizer
    groups: Sequence[MlxGroup]
    norms: Sequence[MlxBatchNorm]
    dtype: mx.Dtype
    """Dtype of the trained arrays."""
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class MlxOptimized(Optimized):
    """An MLX optimizer with its groups in the form of torch's `param_groups`."""

    members: Sequence[MlxGroup] = ()

    @property
    def kind(self) -> str:
        """The class name of the first group's optimizer; torch's name for a built-in optimizer."""
        found = type(self.members[0].optimizer)
        return READY_MADE.get(found, found.__name__)

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters in each group."""
        return [list(group.names) for group in self.members]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups in the format of `torch.optim`, with parameters on the meta device."""
        named = dict(self.named)
        return [{**group.settings, "params": [named[name] for name in group.names]} for group in self.members]


class MlxState:
    """The state of an MLX model with PyTorch parameter names and layouts; the returned tensors are read-only views."""

    def __init__(self, trained: Trained) -> None:
        self.model = trained.model
        self.optimizer = trained.optimizer
        self.origin = trained.origin.description
        self._form, self._groups, self._norms = trained.form, trained.groups, trained.norms
        self._dtype = trained.dtype
        self.optimized: Optimized = MlxOptimized(
            optimizer=trained.optimizer,
            named=[(name, torch_nn.Parameter(value.to("meta"))) for name, value in self._read(self._form.trained)],
            refresh=self._refresh,
            members=trained.groups,
        )
        self._num_batches = trained.origin.num_batches
        """Batches that batch norms have processed in training: torch counts them, MLX does not."""
        self._gradients: Gradients = []
        """Summed gradients, while a callback before the update may read or replace them."""
        self._targets: LocalState | None = None

    @property
    def num_parameters(self) -> int:
        """Number of elements in the model's parameters."""
        return sum(value.numel() for _, value in self._read(self._form.parameters))

    def named_parameters(self) -> Iterator[tuple[str, torch_nn.Parameter]]:
        """Yield the model's parameters with their names in the user's module."""
        for name, value in self._read(self._form.parameters):
            yield name, torch_nn.Parameter(value, requires_grad=name in self._form.trained)

    def buffers(self) -> dict[str, Tensor]:
        """Return the running statistics of batch norms with PyTorch parameter names."""
        counts = {name: torch.tensor(self._num_batches) for name in self._form.counts}
        return {**dict(self._read(self._form.statistics)), **counts}

    def common_buffers(self, *, broadcast: bool) -> dict[str, Tensor]:  # noqa: ARG002 - MLX broadcasts no buffers
        """Return the running statistics if they are synchronized and so equal on all ranks, else {}."""
        return self.buffers() if any(norm.group is not None for norm in self._norms) else {}

    def tied(self) -> dict[str, str]:
        """Return a map of the additional names of tied parameters to the name they are saved under."""
        return dict(self._form.tied)

    def local_state(self) -> LocalState:
        """Return parameters, optimizer states and statistics; does not communicate."""
        values = dict(self._read(self._form.parameters))
        return LocalState(values, read_states(self._groups, self._form), self.buffers())

    def load_targets(self, saved: Forms) -> LocalState:
        """Return tensors for the caller to fill from a checkpoint; `optimized.refresh` loads them into MLX."""
        current = self.local_state()
        states = {name: value.clone() for name, value in current.states.items() if name in saved}
        self._targets = LocalState(_copies(current.values), states, _copies(current.buffers))
        return self._targets

    def _refresh(self) -> None:
        """Load the tensors of `load_targets` into MLX."""
        filled, self._targets = self._targets, None
        if filled is None:
            return
        self._num_batches = max((int(filled.buffers[name]) for name in self._form.counts), default=0)
        arrays = {**filled.values, **{name: filled.buffers[name] for name in self._form.statistics}}
        self._write(arrays)
        write_states(self._groups, self._form, filled.states)

    def whole_weights(self) -> dict[str, Tensor]:
        """Return the full state dict on rank 0, else {}; does not communicate, since every rank has all parameters."""
        if dist.is_initialized() and dist.get_rank():
            return {}
        weights = {**dict(self._read(self._form.parameters)), **self.buffers()}
        weights |= {alias: weights[name] for alias, name in self._form.tied.items()}
        return weights

    def gradients(self) -> dict[str, Tensor]:
        """Return the summed gradients of a step, before the update; does not communicate."""
        named = zip(self._form.trained, self._gradients, strict=True)
        return {name: self._form.to_torch(name, array) for name, array in named}

    local_gradients = gradients

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the gradients of a step before the update."""
        self._gradients = [self._form.to_mlx(name, gradients[name]) for name in self._form.trained]

    @contextmanager
    def evaluating(self, dp_group: dist.ProcessGroup | None) -> Iterator[None]:
        """Set evaluation mode, with rank 0's running statistics on all ranks; communicates over `dp_group`."""
        modes = [(part, part.training) for _, part in self.model.named_modules()]
        self.model.eval()
        if dp_group is not None:
            shared = _copies(dict(self._read(self._form.statistics)))
            for value in shared.values():
                dist.broadcast(value, group=dp_group, group_src=0)
            self._write(shared)
        try:
            yield
        finally:
            for part, was_training in modes:  # one by one: the user may keep some modules in eval mode
                part._set_training_mode(was_training)  # noqa: SLF001 - the public method sets whole trees

    def random_state(self) -> dict[str, Tensor]:
        """Return the states of the host's generators, which data loading may use, and of MLX's generator."""
        return {"cpu": torch.get_rng_state(), **host_states(), _STREAM: _key().view(torch.uint8)}

    def set_random_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore the states from `random_state`; a state saved by the torch engine seeds MLX's generator."""
        torch.set_rng_state(states["cpu"])
        set_host_states(states)
        if _STREAM in states:
            high, low = states[_STREAM].view(torch.uint32).tolist()
            mx.random.seed(high << 32 | low)  # the key consists of the two halves of the seed
        else:
            mx.random.seed(zlib.crc32(states["cpu"].numpy().tobytes()))

    def seed(self, number: int) -> None:
        """Seed the random generators of the host and of MLX."""
        seed_generators(number)
        mx.random.seed(number)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the current state; copies nothing, since MLX arrays are immutable."""
        kept = tree_map(lambda array: array, [self.model.state, self.optimizer.state])
        num_batches, streams = self._num_batches, self.random_state()

        def restore() -> None:
            assign([self.model.state, self.optimizer.state], kept)
            self._num_batches = num_batches
            self.set_random_state(streams)

        return restore

    def _write(self, values: Mapping[str, Tensor]) -> None:
        self._form.write(self.model, {name: self._form.to_mlx(name, value) for name, value in values.items()})

    def _read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name, array in self._form.read(self.model, names).items():
            yield name, self._form.to_torch(name, array)


def _key() -> Tensor:
    """Return MLX's random key, two uint32 values."""
    state: Any = mx.random.state
    return torch.tensor(state[0].tolist(), dtype=torch.uint32)


def _copies(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}
