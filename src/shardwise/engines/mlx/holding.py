"""What a step in MLX holds, as torch has it: values, statistics, optimizer states and random streams, out and in."""

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

from shardwise.engines.mlx.adapters import READY_MADE
from shardwise.engines.mlx.weights import assign, read_states, write_states
from shardwise.job.generators import host_states, seed_generators, set_host_states
from shardwise.parallel.optimizer import Optimized
from shardwise.training.step.module_step import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mlx import nn, optimizers
    from torch import Tensor

    from shardwise.engines.mlx.arrays import ArrayForm, MlxBatchNorm
    from shardwise.engines.mlx.functions import Gradients
    from shardwise.engines.mlx.weights import MlxGroup, Origin
    from shardwise.training.step.module_step import Forms

_STREAM = "mlx"
"""By this name checkpoints have the key that MLX draws from."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model in MLX and what trains it."""

    model: nn.Module
    form: ArrayForm
    optimizer: optimizers.Optimizer
    groups: Sequence[MlxGroup]
    norms: Sequence[MlxBatchNorm]
    dtype: mx.Dtype
    """Of the arrays that are trained."""
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class MlxOptimized(Optimized):
    """MLX's optimizer with torch's words for its groups."""

    members: Sequence[MlxGroup] = ()

    @property
    def kind(self) -> str:
        """The class of the first group's optimizer; of a ready-made one the name that torch's has."""
        found = type(self.members[0].optimizer)
        return READY_MADE.get(found, found.__name__)

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters in each group."""
        return [list(group.names) for group in self.members]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters, without memory, and settings of each group."""
        named = dict(self.named)
        return [{**group.settings, "params": [named[name] for name in group.names]} for group in self.members]


class MlxState:
    """A model in MLX under torch's names and layouts; tensors that it hands out are to be read only."""

    def __init__(self, trained: Trained) -> None:
        self.model = trained.model
        self.optimizer = trained.optimizer
        self.origin = trained.origin.words
        self._form, self._groups, self._norms = trained.form, trained.groups, trained.norms
        self._dtype = trained.dtype
        self.optimized: Optimized = MlxOptimized(
            optimizer=trained.optimizer,
            named=[(name, torch_nn.Parameter(value.to("meta"))) for name, value in self._read(self._form.trained)],
            refresh=self._refresh,
            members=trained.groups,
        )
        self._num_batches = trained.origin.num_batches
        """That batch norms have seen in training: torch's count them, MLX's do not."""
        self._gradients: Gradients = []
        """Summed, while they are shown before the update."""
        self._room: Held | None = None

    @property
    def num_parameters(self) -> int:
        """Elements of the model's parameters."""
        return sum(value.numel() for _, value in self._read(self._form.parameters))

    def named_parameters(self) -> Iterator[tuple[str, torch_nn.Parameter]]:
        """Yield the model's parameters, under the names of the user's own module."""
        for name, value in self._read(self._form.parameters):
            yield name, torch_nn.Parameter(value, requires_grad=name in self._form.trained)

    def buffers(self) -> dict[str, Tensor]:
        """Return the statistics of batch norms, as torch's have them."""
        counts = {name: torch.tensor(self._num_batches) for name in self._form.counts}
        return {**dict(self._read(self._form.statistics)), **counts}

    def common_buffers(self, *, broadcast: bool) -> dict[str, Tensor]:  # noqa: ARG002 - nothing is broadcast here
        """Return the statistics where they are of the rows of all ranks."""
        return self.buffers() if any(norm.group is not None for norm in self._norms) else {}

    def tied(self) -> dict[str, str]:
        """Return the other names of shared parameters, each with the one it is saved under."""
        return dict(self._form.tied)

    def held(self) -> Held:
        """Return values, optimizer states and statistics; no communication."""
        values = dict(self._read(self._form.parameters))
        return Held(values, read_states(self._groups, self._form), self.buffers())

    def room(self, saved: Forms) -> Held:
        """Return copies to be filled, of optimizer states those in `saved`; `optimized.refresh` takes them over."""
        held = self.held()
        states = {name: value.clone() for name, value in held.states.items() if name in saved}
        self._room = Held(_copies(held.values), states, _copies(held.buffers))
        return self._room

    def _refresh(self) -> None:
        """Take over what was written into the room."""
        given, self._room = self._room, None
        if given is None:
            return
        self._num_batches = max((int(given.buffers[name]) for name in self._form.counts), default=0)
        arrays = {**given.values, **{name: given.buffers[name] for name in self._form.statistics}}
        self._form.write(self.model, {name: self._form.to_mlx(name, value) for name, value in arrays.items()})
        write_states(self._groups, self._form, given.states)

    def whole_weights(self) -> dict[str, Tensor]:
        """Return the state dict on rank 0, {} elsewhere; no communication, since every rank has all."""
        if dist.is_initialized() and dist.get_rank():
            return {}
        weights = {**dict(self._read(self._form.parameters)), **self.buffers()}
        weights |= {alias: weights[name] for alias, name in self._form.tied.items()}
        return weights

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of a step while they are summed and not yet used; no communication."""
        named = zip(self._form.trained, self._gradients, strict=True)
        return {name: self._form.to_torch(name, array) for name, array in named}

    own_gradients = gradients

    def put_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the gradients before they are used."""
        self._gradients = [self._form.to_mlx(name, gradients[name]) for name in self._form.trained]

    @contextmanager
    def evaluating(self, readers: dist.ProcessGroup | None) -> Iterator[None]:
        """Put the model into evaluation, with one set of statistics for all readers; communicates over their group."""
        modes = [(part, part.training) for _, part in self.model.named_modules()]
        self.model.eval()
        if readers is not None:
            shared = _copies(dict(self._read(self._form.statistics)))
            for value in shared.values():
                dist.broadcast(value, group=readers, group_src=0)
            self._form.write(self.model, {name: self._form.to_mlx(name, value) for name, value in shared.items()})
        try:
            yield
        finally:
            for part, was_training in modes:  # one by one: some may have been frozen in eval mode by the user
                part._set_training_mode(was_training)  # noqa: SLF001 - MLX's own way is for whole trees

    def random_state(self) -> dict[str, Tensor]:
        """Return the states of the host's generators, which data may draw from, and of MLX's."""
        return {"cpu": torch.get_rng_state(), **host_states(), _STREAM: _key().view(torch.uint8)}

    def set_random_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore what `random_state` returned; a state of the torch engine seeds MLX's generator instead."""
        torch.set_rng_state(states["cpu"])
        set_host_states(states)
        if _STREAM in states:
            high, low = states[_STREAM].view(torch.uint32).tolist()
            mx.random.seed(high << 32 | low)  # a key is the seed's two halves
        else:
            mx.random.seed(zlib.crc32(states["cpu"].numpy().tobytes()))

    def seed(self, number: int) -> None:
        """Begin fresh streams of random numbers."""
        seed_generators(number)
        mx.random.seed(number)

    def snapshot(self) -> Callable[[], None]:
        """Keep this moment's arrays, states and streams; costs nothing, since MLX never writes into an array."""
        kept = tree_map(lambda array: array, [self.model.state, self.optimizer.state])
        num_batches, streams = self._num_batches, self.random_state()

        def restore() -> None:
            assign([self.model.state, self.optimizer.state], kept)
            self._num_batches = num_batches
            self.set_random_state(streams)

        return restore

    def _read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name, array in self._form.read(self.model, names).items():
            yield name, self._form.to_torch(name, array)


def _key() -> Tensor:
    """Return the two words that MLX draws from next."""
    state: Any = mx.random.state
    return torch.tensor(state[0].tolist(), dtype=torch.uint32)


def _copies(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}
