"""Converts DeepSpeed's flat fragments to and from the layout of checkpoints: row shards of named parameters.

One parameter at a time is gathered on every rank; each rank then keeps its rows. Memory beyond DeepSpeed's own is
therefore one whole parameter plus this rank's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardwise.errors import JobError
from shardwise.parallel.collectives import all_gathered, own_shard
from shardwise.parallel.optimizer import host_mesh
from shardwise.training.step.module_step import LocalState, counts_on_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.engines.deepspeed.fragments import Fragments
    from shardwise.parallel.weights import Weights
    from shardwise.training.step.module_step import Forms


@dataclass(frozen=True, kw_only=True)
class ZeroRanks:
    """The ranks that shard parameters; `mesh` is None for unsharded parameters, `group` is None for one rank."""

    mesh: DeviceMesh | None
    group: dist.ProcessGroup | None
    device: torch.device


class DeepSpeedState:
    """Parameters and optimizer states of a DeepSpeed engine by name, as this rank's rows of whole tensors."""

    def __init__(
        self,
        fragments: Fragments,
        named: list[tuple[str, nn.Parameter]],
        shapes: Mapping[str, torch.Size],
        ranks: ZeroRanks,
    ) -> None:
        """`shapes` are the shapes of whole parameters."""
        self._fragments = fragments
        self._named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._shapes = shapes
        self._ranks = ranks
        self._targets = LocalState({}, {})
        self._sharded_keys: set[str] = set()

    def values(self) -> dict[str, Tensor]:
        """Return this rank's rows of every parameter, in fp32; communicates over data-parallel ranks."""
        trained = {name: self._rows(name, self._gather(name, parameter, "")) for name, parameter in self._named}
        for name, parameter in self._frozen:
            with self._fragments.frozen(parameter) as whole:
                trained[name] = self._rows(name, whole.float().clone())
        return trained

    def states(self) -> dict[str, Tensor]:
        """Return this rank's rows of every optimizer state in host memory; communicates over data-parallel ranks."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._named:
            flat_keys, counts = self._keys(parameter)
            for key in flat_keys:
                found[f"{name}/{key}"] = self._rows(name, self._gather(name, parameter, key), on_host=True)
            found |= {f"{name}/{key}": count.detach().clone() for key, count in counts.items()}
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Return full gradients; call between backward and update. Communicates over data-parallel ranks."""
        return {name: self._fragments.gradient(parameter) for name, parameter in self._named}

    def load_targets(self, saved: Forms, *, values: bool) -> LocalState:
        """Return empty tensors for the parameters and the states in `saved`; `load_filled` copies them to DeepSpeed."""
        named = [*self._named, *self._frozen] if values else []
        empty = {name: self._rows(name, self._zeros(name)) for name, _ in named}
        self._sharded_keys = {full.rpartition("/")[2] for full, (shape, _) in saved.items() if shape}
        states = {}
        for full, (shape, dtype) in saved.items():
            name, _, key = full.rpartition("/")
            if key not in self._sharded_keys:
                states[full] = torch.zeros(shape, dtype=dtype)
            elif shape == tuple(self._shapes.get(name, ())):
                states[full] = self._rows(name, self._zeros(name), on_host=True)
            else:
                raise JobError(
                    f"the checkpoint has {key} of {name} in shape {list(shape)}, but DeepSpeed supports optimizer"
                    " states in the shape of their parameter only",
                    code="support.deepspeed-state-shape",
                    fix="resume with --set engine=torch",
                )
        self._targets = LocalState(empty, states)
        return self._targets

    @torch.no_grad()
    def load_filled(self) -> None:
        """Copy the tensors of `load_targets` into DeepSpeed; communicates over data-parallel ranks."""
        filled, self._targets = self._targets, LocalState({}, {})
        for name, parameter in self._named:
            sharded: dict[str, Tensor] = {}
            counts: dict[str, Tensor] = {}
            for full, tensor in filled.states.items():
                owner, _, key = full.rpartition("/")
                if owner == name and key in self._sharded_keys:
                    sharded[key] = self._whole(name, tensor)
                elif owner == name:
                    counts[key] = tensor
            value = self._whole(name, filled.values[name]) if name in filled.values else None
            self._write(parameter, value, sharded)
            self._write_counts(name, parameter, counts)
        if filled.values:
            self._fragments.publish()
            for name, parameter in self._frozen:
                value = self._whole(name, filled.values[name])
                with self._fragments.frozen(parameter) as whole:
                    whole.copy_(value.view(whole.shape))

    @torch.no_grad()
    def start_from(self, weights: Weights, specs: Iterable[tuple[str, Tensor]]) -> None:
        """Set the fp32 master weights to the initial weights before rounding; communicates over the world."""
        parameters = dict(self._named)
        for name, spec in specs:
            value = weights.value(name, spec, self._ranks.device, wanted=name in parameters)
            if value is not None:
                self._write(parameters[name], value.flatten(), {})
        self._fragments.publish()

    def _write(self, parameter: nn.Parameter, value: Tensor | None, states: Mapping[str, Tensor]) -> None:
        if value is None and not states:
            return
        with self._fragments.open(parameter, write=True, make=list(states)) as fragment:
            if fragment is None:
                return
            copies = [(fragment.states[key], source) for key, source in states.items()]
            if value is not None:
                copies.append((fragment.values, value))
            for target, source in copies:
                mine = source[fragment.first : fragment.last]
                target[: mine.numel()].copy_(mine)

    def _write_counts(self, name: str, parameter: nn.Parameter, counts: Mapping[str, Tensor]) -> None:
        """Set scalar states, which DeepSpeed stores once per group; raise if they differ within a group."""
        state = self._fragments.state_of(parameter)
        on_device = counts_on_device(self._fragments.group_of(parameter))
        for key, count in counts.items():
            loaded = count.clone().to(self._ranks.device if on_device else "cpu")
            if key in state and not torch.equal(state[key], loaded):
                raise JobError(
                    f"the checkpoint has {key} {count.item():g} for {name} and {state[key].item():g} for other"
                    " parameters of its group, but DeepSpeed stores one value per group",
                    code="checkpoint.optimizer-steps-differ",
                    fix="resume with --set engine=torch",
                )
            state[key] = loaded

    def _keys(self, parameter: nn.Parameter) -> tuple[list[str], dict[str, Tensor]]:
        """Return the keys of states in the shape of the parameter, and the scalar states."""
        sharded_keys, counts = [], {}
        for key, value in self._fragments.state_of(parameter).items():
            if isinstance(value, Tensor) and value.ndim:
                sharded_keys.append(key)
            elif isinstance(value, Tensor):
                counts[key] = value
        return sharded_keys, counts

    def _zeros(self, name: str) -> Tensor:
        return torch.zeros(self._shapes[name].numel(), device=self._ranks.device)

    def _gather(self, name: str, parameter: nn.Parameter, key: str) -> Tensor:
        """Return the full flat values of a parameter, or of its state `key`; communicates over data-parallel ranks."""
        whole = self._zeros(name)
        with self._fragments.open(parameter) as fragment:
            if fragment is not None:
                mine = fragment.states[key] if key else fragment.values
                target = whole[fragment.first : fragment.last]
                target.copy_(mine[: target.numel()])
        if self._ranks.mesh is not None:
            dist.all_reduce(whole, group=self._ranks.group)
        return whole

    def _rows(self, name: str, whole: Tensor, *, on_host: bool = False) -> Tensor:
        """Return a copy of this rank's rows of a flat whole tensor, as a DTensor."""
        shape, mesh, group = self._shapes[name], self._ranks.mesh, self._ranks.group
        whole = whole.view(shape)
        if mesh is None or group is None or not shape:
            return whole.cpu() if on_host else whole
        mine = own_shard(whole, 0, group).clone()
        if on_host:
            mine, mesh = mine.cpu(), host_mesh(mesh)
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=shape, stride=whole.stride())

    def _whole(self, name: str, rows: Tensor) -> Tensor:
        """Return the full flat tensor, gathered from the rows of all ranks; communicates over data-parallel ranks."""
        if not isinstance(rows, DTensor) or self._ranks.group is None:
            return rows.to(self._ranks.device).flatten()
        mine = rows.to_local().to(self._ranks.device)
        return all_gathered(mine, 0, self._ranks.group, length=self._shapes[name][0]).flatten()
