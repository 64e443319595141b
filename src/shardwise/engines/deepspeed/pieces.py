"""Where DeepSpeed keeps what it trains: this rank's slice of every flattened parameter, by stage."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    State = dict[str, Tensor]


@dataclass(frozen=True)
class FlatPiece:
    """A slice of one flattened parameter, in fp32, as the optimizer moves it."""

    first: int
    """Where the slice begins; behind the parameter's end it is padding."""
    values: Tensor
    states: dict[str, Tensor]
    """Slices of optimizer states of the same length."""

    @property
    def last(self) -> int:
        """Where the slice ends."""
        return self.first + self.values.numel()


class Pieces(Protocol):
    """The slices of one stage; the same calls on every rank, in the same order."""

    def open(
        self, parameter: nn.Parameter, *, write: bool = False, make: Sequence[str] = ()
    ) -> AbstractContextManager[FlatPiece | None]:
        """Enter to read, or to write, this rank's slice of a trained parameter; None: it has none.

        States named in `make` that are not there yet are made, of zeros.
        """

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Communicate to return the whole gradient, between backward and update."""

    def state_of(self, parameter: nn.Parameter) -> State:
        """Return the optimizer's own dictionary for the tensor that a parameter is, or is part of."""

    def group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the parameter group that a parameter is in."""

    def publish(self) -> None:
        """Communicate to give the model the values that were written."""

    def frozen(self, parameter: nn.Parameter) -> AbstractContextManager[Tensor]:
        """Enter to read or write the whole of a parameter that is not trained; may communicate, on every rank."""


class WholePieces:
    """Stage 0: parameters whole on every rank; below fp32 the optimizer has copies of them."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.basic_optimizer
        below = getattr(engine.optimizer, "fp16_groups", [])
        self._masters = {
            id(low): high
            for lows, highs in zip(below, getattr(engine.optimizer, "fp32_groups", []), strict=True)
            for low, high in zip(lows, highs, strict=True)
        }
        self._lows = [low for lows in below for low in lows]

    def open(
        self,
        parameter: nn.Parameter,
        *,
        write: bool = False,  # noqa: ARG002 - memory is read and written alike
        make: Sequence[str] = (),
    ) -> AbstractContextManager[FlatPiece | None]:
        """Everything is here."""
        master = self._master(parameter)
        slices = _slices(self.state_of(parameter), master, make)
        return nullcontext(FlatPiece(0, master.detach().view(-1), {key: each.view(-1) for key, each in slices.items()}))

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Every rank has the sum."""
        assert parameter.grad is not None  # noqa: S101 - DeepSpeed gives every trained parameter one
        return parameter.grad.float()

    def state_of(self, parameter: nn.Parameter) -> State:
        """Each parameter has its own."""
        state: State = self._optimizer.state[self._master(parameter)]
        return state

    def group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The group that holds it, or its copy."""
        master = self._master(parameter)
        return next(group for group in self._optimizer.param_groups if _holds(group, master))

    def publish(self) -> None:
        """Round the copies into the model."""
        for low in self._lows:
            low.data.copy_(self._masters[id(low)].data)

    def frozen(self, parameter: nn.Parameter) -> AbstractContextManager[Tensor]:
        """Everything is here."""
        return nullcontext(parameter.detach())

    def _master(self, parameter: nn.Parameter) -> Tensor:
        master: Tensor = self._masters.get(id(parameter), parameter)
        return master


class FlatPieces:
    """Stages 1 and 2: the parameters of a group end to end, cut into as many equal parts as there are ranks."""

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer
        self._group = {id(low): number for number, lows in enumerate(self._zero.bit16_groups) for low in lows}

    def open(
        self,
        parameter: Any,
        *,
        write: bool = False,  # noqa: ARG002 - memory is read and written alike
        make: Sequence[str] = (),
    ) -> AbstractContextManager[FlatPiece | None]:
        """The slice that falls into this rank's part."""
        flat = self._flat(parameter)
        slices = _slices(self.state_of(parameter), flat, make)
        mapping = parameter._hp_mapping  # noqa: SLF001 - what its own get_full_hp_param reads
        if mapping is None:
            return nullcontext(None)
        place = mapping.hp_fragment_address
        slices = {key: each.narrow(0, place.start, place.numel) for key, each in slices.items()}
        values = flat.detach().narrow(0, place.start, place.numel)
        return nullcontext(FlatPiece(mapping.lp_fragment_address.start, values, slices))

    def gradient(self, parameter: Any) -> Tensor:
        """Communicate to join the slices of all ranks."""
        gradient: Tensor = parameter.get_full_hp_grad()
        return gradient

    def state_of(self, parameter: nn.Parameter) -> State:
        """One for all parameters of a group."""
        state: State = self._zero.optimizer.state[self._flat(parameter)]
        return state

    def group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Groups and flat tensors are one to one."""
        group: dict[str, Any] = self._zero.param_groups[self._group[id(parameter)]]
        return group

    def publish(self) -> None:
        """Round this rank's part into the model and gather those of all."""
        self._zero.update_lp_params()

    def frozen(self, parameter: nn.Parameter) -> AbstractContextManager[Tensor]:
        """What is not trained is not cut."""
        return nullcontext(parameter.detach())

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        flat: Tensor = self._zero.single_partition_of_fp32_groups[self._group[id(parameter)]]
        return flat


class CutPieces:
    """Stage 3: every parameter flattened and cut by itself; slices wait in memory or on nvme."""

    def __init__(self, engine: Any, rank: int) -> None:
        self._zero = engine.optimizer
        self._rank = rank

    @contextmanager
    def open(self, parameter: Any, *, write: bool = False, make: Sequence[str] = ()) -> Iterator[FlatPiece | None]:
        """The slice of this rank, fetched from nvme where it waits there."""
        zero = self._zero
        number, first, length = self._place(parameter)
        swaps = zero._swappable_optimizer_subgroup(number)  # noqa: SLF001 - what its own get_full_hp_param does
        if swaps:
            zero._optimizer_states_and_gradient_swap_in(number)  # noqa: SLF001
        flat = zero.fp32_partitioned_groups_flat[number]
        slices = _slices(zero.optimizer.state[flat], flat, make)
        slices = {key: each.narrow(0, first, length) for key, each in slices.items()}
        yield FlatPiece(self._rank * length, flat.detach().narrow(0, first, length), slices)
        if swaps and write:
            zero._optimizer_states_and_gradient_swap_out(number)  # noqa: SLF001
        elif swaps:
            zero._release_swap_buffers(number)  # noqa: SLF001

    def gradient(self, parameter: Any) -> Tensor:
        """Communicate to join the slices of all ranks."""
        gradient: Tensor = self._zero.get_fp32_grad_for_param(parameter)
        return gradient

    def state_of(self, parameter: Any) -> State:
        """One for all parameters of a sub-group."""
        number, _, _ = self._place(parameter)
        state: State = self._zero.optimizer.state[self._zero.fp32_partitioned_groups_flat[number]]
        return state

    def group_of(self, parameter: Any) -> dict[str, Any]:
        """A group may be several sub-groups."""
        number, _, _ = self._place(parameter)
        group: dict[str, Any] = self._zero.param_groups[self._zero.sub_group_to_group_id[number]]
        return group

    @torch.no_grad()
    def publish(self) -> None:
        """Round the slices into those of the model, and gather the parameters that stay whole."""
        zero = self._zero
        zero._partition_all_parameters()  # noqa: SLF001 - as its own step does before it writes
        for number in range(len(zero.fp16_groups)):
            swaps = zero._swappable_optimizer_subgroup(number)  # noqa: SLF001
            if swaps:
                zero._optimizer_states_and_gradient_swap_in(number)  # noqa: SLF001
            zero._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001
            if swaps:
                zero._release_swap_buffers(number)  # noqa: SLF001
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    @contextmanager
    def frozen(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        """Communicate to gather it, and to cut it again; the first rank's values count."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], modifier_rank=0):
            yield parameter.detach()

    def _place(self, parameter: Any) -> tuple[int, int, int]:
        """Return the sub-group, and where in its flat tensor the slice begins and how long it is."""
        place: tuple[int, int, int] = self._zero.grad_position[self._zero.get_param_id(parameter)]
        return place


def _holds(group: dict[str, Any], parameter: Tensor) -> bool:
    return any(each is parameter for each in group["params"])


def _slices(state: State, flat: Tensor, make: Sequence[str]) -> State:
    """Return the states that are shaped like what is trained."""
    for key in make:
        if key not in state:
            state[key] = torch.zeros_like(flat, requires_grad=False)
    return {key: each for key, each in state.items() if isinstance(each, Tensor) and each.shape == flat.shape}


def find_pieces(engine: Any, rank: int) -> Pieces:
    """Return the slices of the stage that an engine trains in."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return CutPieces(engine, rank)
    return FlatPieces(engine) if stage else WholePieces(engine)
