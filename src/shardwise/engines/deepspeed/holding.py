"""DeepSpeed's slices under the names and in the layout of our checkpoints: rows of whole parameters, and back."""

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
from shardwise.training.step.module_step import Held, counts_on_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.engines.deepspeed.pieces import Pieces
    from shardwise.parallel.weights import Weights
    from shardwise.training.step.module_step import Forms


@dataclass(frozen=True, kw_only=True)
class ZeroRanks:
    """Who cuts parameters: no mesh where every rank has them whole, no group where there is one rank."""

    mesh: DeviceMesh | None
    group: dist.ProcessGroup | None
    device: torch.device


class DeepSpeedState:
    """What an engine trains, by name; a parameter at a time is whole on a rank, and only its rows stay."""

    def __init__(
        self, pieces: Pieces, named: list[tuple[str, nn.Parameter]], shapes: Mapping[str, torch.Size], ranks: ZeroRanks
    ) -> None:
        """`shapes` are those of whole parameters."""
        self._pieces = pieces
        self._named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._shapes = shapes
        self._ranks = ranks
        self._given = Held({}, {})
        self._cut: set[str] = set()

    def values(self) -> dict[str, Tensor]:
        """Communicate to return this rank's rows of every parameter, in fp32."""
        trained = {name: self._rows(name, self._join(name, parameter, "")) for name, parameter in self._named}
        for name, parameter in self._frozen:
            with self._pieces.frozen(parameter) as whole:
                trained[name] = self._rows(name, whole.float().clone())
        return trained

    def states(self) -> dict[str, Tensor]:
        """Communicate to return this rank's rows of every optimizer state, on the host."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._named:
            flat_keys, counts = self._keys(parameter)
            for key in flat_keys:
                found[f"{name}/{key}"] = self._rows(name, self._join(name, parameter, key), on_host=True)
            found |= {f"{name}/{key}": count.detach().clone() for key, count in counts.items()}
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Communicate to return whole gradients, between backward and update."""
        return {name: self._pieces.gradient(parameter) for name, parameter in self._named}

    def room(self, saved: Forms, *, values: bool) -> Held:
        """Return tensors to be filled, with the states in `saved`; `take` takes them over."""
        named = [*self._named, *self._frozen] if values else []
        empty = {name: self._rows(name, self._blank(name)) for name, _ in named}
        self._cut = {full.rpartition("/")[2] for full, (shape, _) in saved.items() if shape}
        states = {}
        for full, (shape, dtype) in saved.items():
            name, _, key = full.rpartition("/")
            if key not in self._cut:
                states[full] = torch.zeros(shape, dtype=dtype)
            elif shape == tuple(self._shapes.get(name, ())):
                states[full] = self._rows(name, self._blank(name), on_host=True)
            else:
                raise JobError(
                    f"the checkpoint has {key} of {name} as {list(shape)}, which no slice of the parameter can hold",
                    code="support.deepspeed-state-shape",
                    fix="resume with --set engine=torch",
                )
        self._given = Held(empty, states)
        return self._given

    @torch.no_grad()
    def take(self) -> None:
        """Communicate to hand what was filled to DeepSpeed."""
        given, self._given = self._given, Held({}, {})
        for name, parameter in self._named:
            prefix = f"{name}/"
            states = {key.removeprefix(prefix): each for key, each in given.states.items() if key.startswith(prefix)}
            cut = {key: self._whole(name, rows) for key, rows in states.items() if key in self._cut}
            value = self._whole(name, given.values[name]) if name in given.values else None
            self._write(parameter, value, cut)
            self._write_counts(name, parameter, {key: each for key, each in states.items() if key not in self._cut})
        if given.values:
            self._pieces.publish()
            for name, parameter in self._frozen:
                value = self._whole(name, given.values[name])
                with self._pieces.frozen(parameter) as whole:
                    whole.copy_(value.view(whole.shape))

    @torch.no_grad()
    def start_from(self, weights: Weights, specs: Iterable[tuple[str, Tensor]]) -> None:
        """Communicate to set what is trained to the very first values, which the model has only rounded."""
        parameters = dict(self._named)
        for name, spec in specs:
            value = weights.value(name, spec, self._ranks.device, wanted=name in parameters)
            if value is not None:
                self._write(parameters[name], value.flatten(), {})
        self._pieces.publish()

    def _write(self, parameter: nn.Parameter, value: Tensor | None, states: Mapping[str, Tensor]) -> None:
        if value is None and not states:
            return
        with self._pieces.open(parameter, write=True, make=list(states)) as piece:
            if piece is None:
                return
            targets = [(piece.states[key], source) for key, source in states.items()]
            for target, source in targets if value is None else [(piece.values, value), *targets]:
                mine = source[piece.first : piece.last]
                target[: mine.numel()].copy_(mine)

    def _write_counts(self, name: str, parameter: nn.Parameter, counts: Mapping[str, Tensor]) -> None:
        """Set what the optimizer keeps once for many parameters; it must have been the same for all of them."""
        state = self._pieces.state_of(parameter)
        on_device = counts_on_device(self._pieces.group_of(parameter))
        for key, count in counts.items():
            given = count.clone().to(self._ranks.device if on_device else "cpu")
            if key in state and not torch.equal(state[key], given):
                raise JobError(
                    f"the checkpoint has {key} {count.item():g} for {name} and {state[key].item():g} for others, which"
                    " share one under DeepSpeed",
                    code="checkpoint.optimizer-steps-differ",
                    fix="resume with --set engine=torch",
                )
            state[key] = given

    def _keys(self, parameter: nn.Parameter) -> tuple[list[str], dict[str, Tensor]]:
        """Return the keys of states that are cut like parameters, and what is kept once."""
        state = {key: each for key, each in self._pieces.state_of(parameter).items() if isinstance(each, Tensor)}
        return [key for key, each in state.items() if each.ndim], {
            k: each for k, each in state.items() if not each.ndim
        }

    def _blank(self, name: str) -> Tensor:
        return torch.zeros(self._shapes[name].numel(), device=self._ranks.device)

    def _join(self, name: str, parameter: nn.Parameter, key: str) -> Tensor:
        """Communicate to return a flat whole value, or state where `key` names one."""
        whole = self._blank(name)
        with self._pieces.open(parameter) as piece:
            if piece is not None:
                mine = piece.states[key] if key else piece.values
                target = whole[piece.first : piece.last]
                target.copy_(mine[: target.numel()])
        if self._ranks.mesh is not None:
            dist.all_reduce(whole, group=self._ranks.group)
        return whole

    def _rows(self, name: str, whole: Tensor, *, on_host: bool = False) -> Tensor:
        """Return this rank's rows of a flat whole tensor, which may then go."""
        shape, mesh, group = self._shapes[name], self._ranks.mesh, self._ranks.group
        whole = whole.view(shape)
        if mesh is None or group is None or not shape:
            return whole.cpu() if on_host else whole
        mine = own_shard(whole, 0, group).clone()
        if on_host:
            mine, mesh = mine.cpu(), host_mesh(mesh)
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=shape, stride=whole.stride())

    def _whole(self, name: str, rows: Tensor) -> Tensor:
        """Communicate to return a flat whole tensor from the rows of all ranks."""
        if not isinstance(rows, DTensor) or self._ranks.group is None:
            return rows.to(self._ranks.device).flatten()
        mine = rows.to_local().to(self._ranks.device)
        return all_gathered(mine, 0, self._ranks.group, length=self._shapes[name][0]).flatten()
