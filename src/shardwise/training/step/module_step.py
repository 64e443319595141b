"""The base of steps over a torch module: buffers, parameter names, random generators, full weights and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shardwise.checkpoint.convert.hugging_face import merge_state
from shardwise.job.generators import host_states, seed_generators, set_host_states
from shardwise.parallel.batch_norm import BatchNorm
from shardwise.parallel.collectives import full_state_dict, own_buffers, stages_of, unwrap
from shardwise.parallel.gradsync import local
from shardwise.parallel.lora import adapted as adapted_parts
from shardwise.parallel.mixed_adamw import dense_state, stored_tensors
from shardwise.parallel.stages import Stage
from shardwise.parallel.tensor_rules import is_transposed
from shardwise.torch_private.dispatch import NormBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from shardwise.parallel.optimizer import Optimized
    from shardwise.training.step.update import Update


class ModuleStep:
    """A step whose model is a torch module: replicated, sharded, or the list of this rank's pipeline stages."""

    model: nn.Module
    optimizer: Optimizer
    optimized: Optimized
    update: Update

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's pipeline stages with their names in the user's module."""
        raise NotImplementedError

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that this rank owns, by name."""
        return dict(own_buffers(self.model))

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers that this rank owns, by name."""
        found: dict[str, Tensor] = {}
        for stage in stages_of(self.model):
            foreign = getattr(stage, "foreign_buffers", ())
            saved = stage.state_dict(keep_vars=True)
            found |= {name: buffer for name, buffer in stage.named_buffers() if name in saved and name not in foreign}
        return found

    def common_buffers(self, *, broadcast: bool) -> dict[str, Tensor]:
        """Return the buffers that are equal on all ranks; if `broadcast`, without those that DDP broadcasts."""
        synced: set[int] = set()
        per_rank: set[int] = set()  # batch statistics of one rank differ by design
        for module in self.model.modules():
            if isinstance(module, NormBase):
                is_synced = isinstance(module, BatchNorm) and module.group is not None
                (synced if is_synced else per_rank).update(map(id, module.buffers()))
        excluded = per_rank - synced
        if broadcast:
            excluded = {id(buffer) for buffer in self.model.buffers()} - synced
        return {name: buffer for name, buffer in own_buffers(self.model) if id(buffer) not in excluded}

    def tied(self) -> dict[str, str]:
        """Return a map from each alias of a tied parameter to the name under which it is saved."""
        stages = stages_of(self.model)
        if isinstance(stages[0], Stage):
            return dict(stages[0].model_ties.first_names)  # every stage has the ties of the whole model
        first_names = {id(parameter): name for name, parameter in self.named_parameters()}
        tied: dict[str, str] = {}
        for name, parameter in stages[0].named_parameters(remove_duplicate=False):
            first = first_names[id(parameter)]
            if first != name:
                tied[name] = first
        return tied

    def whole_weights(self) -> dict[str, Tensor]:
        """Return the full state dict of the user's model on rank 0, else {}. Communicates over the world."""
        return whole_weights(self.model)

    @contextmanager
    def evaluating(self, dp_group: dist.ProcessGroup | None) -> Iterator[None]:
        """Switch the model to eval mode with the buffers of rank 0. Communicates over the data-parallel group.

        Local batch statistics differ by rank, and all ranks must evaluate the same model.
        """
        module = unwrap(self.model)
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        if dp_group is not None:
            for buffer in module.buffers():
                dist.broadcast(buffer, group=dp_group, group_src=0)
        try:
            yield
        finally:
            for part, was_training in modes:  # per module, because the user may have set some to eval mode
                part.training = was_training

    def random_state(self) -> dict[str, Tensor]:
        """Return the states of the random generators that a step uses, by name."""
        states = {"cpu": torch.get_rng_state(), **host_states()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def set_random_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore the random generators to the states of `random_state`."""
        torch.set_rng_state(states["cpu"])
        set_host_states(states)
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])

    def seed(self, number: int) -> None:
        """Seed the random generators of this process."""
        seed_generators(number)

    def local_gradients(self) -> dict[str, Tensor]:
        """Return this rank's shard of the reduced gradients, without communication."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                found[name] = local(parameter.grad)
        return found

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace this rank's gradients before the update uses them."""
        for name, gradient in self.local_gradients().items():
            gradient.copy_(gradients[name])

    def snapshot(self) -> Callable[[], None]:
        """Copy the parameters, states and random generators to the host; return a function that restores them."""
        values = [parameter.detach() for _, parameter in self.named_parameters()]
        values += [buffer for _, buffer in self.model.named_buffers()]
        values += [*self.update.state().values(), *self.optimized.masters.values()]
        restore_tensors = snapshot(values, self.optimizer)
        random_state = self.random_state()

        def restore() -> None:
            restore_tensors()
            self.optimized.refresh()
            self.set_random_state(random_state)

        return restore


# The local part of the training state, under the parameter names of the user's module.


Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Full (unsharded) shape and dtype of tensors by name."""


class LocalState(NamedTuple):
    """This rank's tensors of the training state; shards are DTensors."""

    values: dict[str, Tensor]
    """Parameters, in the dtype in which they are trained."""
    states: dict[str, Tensor]
    """Optimizer states, as PARAMETER/KEY."""
    buffers: Mapping[str, Tensor] = MappingProxyType({})
    """Persistent buffers."""
    update: Mapping[str, Tensor] = MappingProxyType({})
    """State of the update (the loss scale), and of the outer optimizer of `sync_every`, as KEY/PARAMETER."""


def states_of(optimized: Optimized) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's states as PARAMETER/KEY, without copies or communication."""
    found = {}
    for name, parameter in optimized.named:
        for key, value in optimized.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}/{key}"] = dense_state(value, parameter)
    return found


def make_states(optimized: Optimized, saved: Forms) -> None:
    """Allocate the optimizer states that `saved` contains, as PARAMETER/KEY.

    A state with the shape of its parameter is sharded like the parameter; any other state (a step count) is replicated.
    For a scalar parameter, the step count is the state that torch names "step".
    """
    for name, parameter in optimized.named:
        prefix = f"{name}/"
        state = optimized.optimizer.state[parameter]
        for full, (shape, dtype) in saved.items():
            if full.startswith(prefix):
                key = full.removeprefix(prefix)
                is_like = tuple(parameter.shape) == shape and (bool(shape) or key != "step")
                state[key] = _like(parameter, shape, dtype, None if is_like else optimized.optimizer)


def _like(parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype, optimizer: Optimizer | None) -> Tensor:
    """Return zeros like the parameter or, with `optimizer`, a step count on the device that it requires."""
    if optimizer is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    device = torch.device("cpu")
    for group in optimizer.param_groups:
        if counts_on_device(group) and any(each is parameter for each in group["params"]):
            device = parameter.device
    return torch.zeros(shape, dtype=dtype, device=device)


def counts_on_device(group: Mapping[str, object]) -> bool:
    """Return whether a parameter group stores its step count on the device, as fused and capturable optimizers do."""
    return bool(group.get("fused") or group.get("capturable"))


# Full weights of a torch module under any strategy, with the names of the user's model, and its LoRA configuration.


T = TypeVar("T")


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the full state dict of the user's model on rank 0 and {} on other ranks. Communicates over the world.

    Adapters are merged into their base weights.
    """
    weights = full_state_dict(model)
    for alias, name in _tied(model).items():
        if alias in weights:
            weights[alias] = weights[name]  # shared storage, so the file contains one copy
    lora = adapter_facts(model)
    return weights if lora is None else merge_state(weights, lora)


def adapter_facts(model: nn.Module) -> dict[str, Any] | None:
    """Return a model's LoRA configuration (Lora.facts) and class, or None. Communicates over the world."""
    local_lora, local_names = None, []
    for stage in stages_of(model):
        for name, part in adapted_parts(stage):
            local_lora = local_lora or part.lora
            if is_transposed(part):
                local_names.append(name)
    lora, transposed = None, set()
    for lora_of_rank, names in gather_objects((local_lora, local_names)):
        lora = lora or lora_of_rank
        transposed.update(names)
    if lora is None:
        return None
    kind = user_class(model)
    return {**lora.facts(transposed), "class": [kind.__module__, kind.__name__]}


def user_module(model: nn.Module) -> nn.Module:
    """Return the user's module inside `model`, without DDP's wrapper; with pp, that of this rank's first stage."""
    module = unwrap(stages_of(model)[0])
    found: nn.Module = vars(module).get("_user_module", module)
    return found


def user_class(model: nn.Module) -> type:
    """Return the class of the user's module, which FSDP2 replaces by a subclass."""
    module = user_module(model)
    return type(module).__mro__[2 if isinstance(module, FSDPModule) else 0]


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks. Communicates over the world; call on every rank."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _tied(model: nn.Module) -> dict[str, str]:
    """Return a map from each alias of a tied weight to its first name."""
    tied = {}
    for stage in stages_of(model):
        if isinstance(stage, Stage):
            return dict(stage.model_ties.first_names)  # every stage has the ties of the whole model
        first: dict[int, str] = {}
        for name, value in stage.state_dict(keep_vars=True).items():
            original = first.setdefault(id(value), name)
            if original != name:
                tied[name] = original
    return tied


# Snapshots of the training state: host copies of tensors and optimizer states that can be restored.


def snapshot(tensors: Sequence[Tensor], optimizer: Optimizer) -> Callable[[], None]:
    """Copy tensors and optimizer states to the host; return a function that restores them and removes new states."""
    states = optimizer.state
    known: dict[Tensor, set[str]] = {}
    plain: dict[Tensor, dict[str, Any]] = {}
    saved = list(tensors)
    for parameter, state in states.items():
        known[parameter], plain[parameter] = set(state), {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                saved += stored_tensors(value)
            else:
                plain[parameter][key] = value
    pairs = [(local(tensor), on_host(local(tensor))) for tensor in saved]

    @torch.no_grad()
    def restore() -> None:
        for tensor, before in pairs:
            tensor.copy_(before)
        for parameter in list(states):
            if parameter not in known:
                del states[parameter]
                continue
            for key in set(states[parameter]) - known[parameter]:
                del states[parameter][key]
            states[parameter].update(plain[parameter])

    return restore


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the host."""
    return tensor.detach().to("cpu", copy=True)
