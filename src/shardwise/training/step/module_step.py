"""What a step over a torch module tells of that model: its buffers, names, random streams, mode and whole weights."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

from shardwise.job.generators import host_states, seed_generators, set_host_states
from shardwise.parallel.apply import stages_of, unwrap
from shardwise.parallel.batch_norm import BatchNorm
from shardwise.parallel.gather import own_buffers
from shardwise.parallel.gradsync import local
from shardwise.parallel.stages import Stage
from shardwise.training.step.snapshot import snapshot
from shardwise.training.step.whole import whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardwise.parallel.optimizer import Optimized
    from shardwise.training.step.update import Update


class ModuleStep:
    """A step whose model is a torch module, whole, cut, or the list of this rank's stages."""

    model: nn.Module
    optimizer: Optimizer
    optimized: Optimized
    update: Update

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank holds of the model, under the names of the user's own module."""
        raise NotImplementedError

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers whose values count on this rank."""
        return dict(own_buffers(self.model))

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return those of them that a state dict has."""
        found: dict[str, Tensor] = {}
        for stage in stages_of(self.model):
            foreign = getattr(stage, "foreign_buffers", ())
            saved = stage.state_dict(keep_vars=True)
            found |= {name: buffer for name, buffer in stage.named_buffers() if name in saved and name not in foreign}
        return found

    def common_buffers(self, *, broadcast: bool) -> dict[str, Tensor]:
        """Return the buffers that ranks hold alike; where DDP broadcasts them, it makes some equal only in forward."""
        norms = [module for module in self.model.modules() if isinstance(module, _NormBase)]
        shared = [norm for norm in norms if isinstance(norm, BatchNorm) and norm.group is not None]
        synced = {id(buffer) for norm in shared for buffer in norm.buffers()}
        # Statistics of the rows of one rank differ by design.
        own = {id(buffer) for norm in norms for buffer in norm.buffers()} - synced
        return {
            name: buffer
            for name, buffer in own_buffers(self.model)
            if id(buffer) in synced or not (broadcast or id(buffer) in own)
        }

    def tied(self) -> dict[str, str]:
        """Return the other names of shared parameters, each with the one it is saved under."""
        stages = stages_of(self.model)
        if isinstance(stages[0], Stage):
            return dict(stages[0].model_ties.first_names)  # every stage knows those of all
        kept = {id(parameter): name for name, parameter in self.named_parameters()}
        everywhere = stages[0].named_parameters(remove_duplicate=False)
        return {name: kept[id(parameter)] for name, parameter in everywhere if kept[id(parameter)] != name}

    def whole_weights(self) -> dict[str, Tensor]:
        """Communicate over the world to return the state dict of the user's own model on rank 0, {} elsewhere."""
        return whole_weights(self.model)

    @contextmanager
    def evaluating(self, readers: dist.ProcessGroup | None) -> Iterator[None]:
        """Put the model into evaluation, with one set of buffers for all readers; communicates over their group.

        Local batch statistics differ by rank, and one model is evaluated, not one per rank.
        """
        module = unwrap(self.model)
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        if readers is not None:
            for buffer in module.buffers():
                dist.broadcast(buffer, group=readers, group_src=0)
        try:
            yield
        finally:
            for part, was_training in modes:  # one by one: some may have been frozen in eval mode by the user
                part.training = was_training

    def random_state(self) -> dict[str, Tensor]:
        """Return the states of the generators that a step draws from, by name."""
        states = {"cpu": torch.get_rng_state(), **host_states()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def set_random_state(self, states: Mapping[str, Tensor]) -> None:
        """Go on drawing where `random_state` was called."""
        torch.set_rng_state(states["cpu"])
        set_host_states(states)
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])

    def seed(self, number: int) -> None:
        """Begin fresh streams of random numbers."""
        seed_generators(number)

    def own_gradients(self) -> dict[str, Tensor]:
        """Return this rank's own part of the summed gradients, while they are not yet used; no communication."""
        found = ((name, parameter.grad) for name, parameter in self.named_parameters())
        return {name: local(gradient) for name, gradient in found if gradient is not None}

    def put_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace this rank's own gradients before they are used."""
        for name, gradient in self.own_gradients().items():
            gradient.copy_(gradients[name])

    def snapshot(self) -> Callable[[], None]:
        """Keep this moment's values, states and streams, on the host; returns what brings them back."""
        values = [parameter.detach() for _, parameter in self.named_parameters()]
        values += [buffer for _, buffer in self.model.named_buffers()]
        values += self.update.state().values()
        put_back = snapshot(values, self.optimizer)
        streams = self.random_state()

        def restore() -> None:
            put_back()
            self.optimized.refresh()
            self.set_random_state(streams)

        return restore
