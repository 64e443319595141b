"""Access to the fp32 values and optimizer states that DeepSpeed partitions, one implementation per ZeRO stage.

A fragment is this rank's slice of one flattened parameter. Stage 0 keeps whole parameters; stages 1 and 2 concatenate
the parameters of a group and split the result evenly over ranks, so a fragment may be empty; stage 3 splits every
parameter by itself. The code reads the same private attributes as DeepSpeed's own `get_full_hp_param`.
"""

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
class Fragment:
    """A slice of one flattened parameter, in fp32, that the optimizer of this rank updates."""

    first: int
    """Index of the first element in the parameter; elements beyond the parameter's end are padding."""
    values: Tensor
    states: dict[str, Tensor]
    """Slices of optimizer states of the same length."""

    @property
    def last(self) -> int:
        """Index after the last element."""
        return self.first + self.values.numel()


class Fragments(Protocol):
    """The fragments of one ZeRO stage; every rank makes the same calls in the same order."""

    def open(
        self, parameter: nn.Parameter, *, write: bool = False, make: Sequence[str] = ()
    ) -> AbstractContextManager[Fragment | None]:
        """Return a context that yields this rank's fragment of a trained parameter, or None if it has none.

        States named in `make` that do not exist yet are created as zeros.
        """

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the full gradient; call between backward and update. Communicates over data-parallel ranks."""

    def state_of(self, parameter: nn.Parameter) -> State:
        """Return the optimizer's own state dictionary for the tensor that contains a parameter."""

    def group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's parameter group that contains a parameter."""

    def publish(self) -> None:
        """Copy the written fp32 values into the model; communicates over data-parallel ranks."""

    def frozen(self, parameter: nn.Parameter) -> AbstractContextManager[Tensor]:
        """Return a context that yields a full parameter that is not trained. May communicate; call on every rank."""


class WholeFragments:
    """Stage 0: every rank has full parameters; in bf16 and fp16 the optimizer has fp32 copies of them."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.basic_optimizer
        low_groups = getattr(engine.optimizer, "fp16_groups", [])
        high_groups = getattr(engine.optimizer, "fp32_groups", [])
        self._lows: list[Tensor] = []
        self._masters: dict[int, Tensor] = {}
        for lows, highs in zip(low_groups, high_groups, strict=True):
            self._lows += lows
            self._masters |= {id(low): high for low, high in zip(lows, highs, strict=True)}

    def open(
        self,
        parameter: nn.Parameter,
        *,
        write: bool = False,  # noqa: ARG002 - reading and writing do not differ in memory
        make: Sequence[str] = (),
    ) -> AbstractContextManager[Fragment | None]:
        """Return the whole parameter as one fragment."""
        master = self._master(parameter)
        slices = _slices(self.state_of(parameter), master, make)
        return nullcontext(Fragment(0, master.detach().view(-1), {key: each.view(-1) for key, each in slices.items()}))

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the reduced gradient, which every rank has."""
        assert parameter.grad is not None  # noqa: S101 - DeepSpeed sets it for every trained parameter
        return parameter.grad.float()

    def state_of(self, parameter: nn.Parameter) -> State:
        """Return the state of the parameter or of its fp32 copy."""
        state: State = self._optimizer.state[self._master(parameter)]
        return state

    def group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the group of the parameter or of its fp32 copy."""
        master = self._master(parameter)
        return next(group for group in self._optimizer.param_groups if _contains(group, master))

    def publish(self) -> None:
        """Cast the fp32 copies into the model's parameters."""
        for low in self._lows:
            low.data.copy_(self._masters[id(low)].data)

    def frozen(self, parameter: nn.Parameter) -> AbstractContextManager[Tensor]:
        """Return the parameter, which is whole on every rank."""
        return nullcontext(parameter.detach())

    def _master(self, parameter: nn.Parameter) -> Tensor:
        master: Tensor = self._masters.get(id(parameter), parameter)
        return master


class GroupFragments:
    """Stages 1 and 2: the parameters of a group are concatenated and split evenly over ranks."""

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer
        self._group = {id(low): number for number, lows in enumerate(self._zero.bit16_groups) for low in lows}

    def open(
        self,
        parameter: Any,
        *,
        write: bool = False,  # noqa: ARG002 - reading and writing do not differ in memory
        make: Sequence[str] = (),
    ) -> AbstractContextManager[Fragment | None]:
        """Return the slice of the parameter in this rank's partition, or None if the partition has no element of it."""
        flat = self._flat(parameter)
        slices = _slices(self.state_of(parameter), flat, make)
        mapping = parameter._hp_mapping  # noqa: SLF001 - DeepSpeed's get_full_hp_param reads it
        if mapping is None:
            return nullcontext(None)
        place = mapping.hp_fragment_address
        slices = {key: each.narrow(0, place.start, place.numel) for key, each in slices.items()}
        values = flat.detach().narrow(0, place.start, place.numel)
        return nullcontext(Fragment(mapping.lp_fragment_address.start, values, slices))

    def gradient(self, parameter: Any) -> Tensor:
        """Return the gradient gathered from all ranks; communicates over data-parallel ranks."""
        gradient: Tensor = parameter.get_full_hp_grad()
        return gradient

    def state_of(self, parameter: nn.Parameter) -> State:
        """Return the state that all parameters of a group share."""
        state: State = self._zero.optimizer.state[self._flat(parameter)]
        return state

    def group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's group of the parameter; each group has one flat tensor."""
        group: dict[str, Any] = self._zero.param_groups[self._group[id(parameter)]]
        return group

    def publish(self) -> None:
        """Cast this rank's partition into the model and all-gather the partitions."""
        self._zero.update_lp_params()

    def frozen(self, parameter: nn.Parameter) -> AbstractContextManager[Tensor]:
        """Return the parameter: these stages partition trained parameters only."""
        return nullcontext(parameter.detach())

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        flat: Tensor = self._zero.single_partition_of_fp32_groups[self._group[id(parameter)]]
        return flat


class ParameterFragments:
    """Stage 3: every parameter is flattened and split separately; fragments are in memory or on nvme."""

    def __init__(self, engine: Any, rank: int) -> None:
        self._zero = engine.optimizer
        self._rank = rank

    @contextmanager
    def open(self, parameter: Any, *, write: bool = False, make: Sequence[str] = ()) -> Iterator[Fragment | None]:
        """Yield this rank's fragment, read from nvme and written back if it is offloaded."""
        zero = self._zero
        number, first, length = self._position(parameter)
        swaps = zero._swappable_optimizer_subgroup(number)  # noqa: SLF001 - DeepSpeed's get_full_hp_param does the same
        if swaps:
            zero._optimizer_states_and_gradient_swap_in(number)  # noqa: SLF001
        flat = zero.fp32_partitioned_groups_flat[number]
        slices = _slices(zero.optimizer.state[flat], flat, make)
        slices = {key: each.narrow(0, first, length) for key, each in slices.items()}
        yield Fragment(self._rank * length, flat.detach().narrow(0, first, length), slices)
        if swaps and write:
            zero._optimizer_states_and_gradient_swap_out(number)  # noqa: SLF001
        elif swaps:
            zero._release_swap_buffers(number)  # noqa: SLF001

    def gradient(self, parameter: Any) -> Tensor:
        """Return the gradient gathered from all ranks; communicates over data-parallel ranks."""
        gradient: Tensor = self._zero.get_fp32_grad_for_param(parameter)
        return gradient

    def state_of(self, parameter: Any) -> State:
        """Return the state that all parameters of a sub-group share."""
        number, _, _ = self._position(parameter)
        state: State = self._zero.optimizer.state[self._zero.fp32_partitioned_groups_flat[number]]
        return state

    def group_of(self, parameter: Any) -> dict[str, Any]:
        """Return the group of the parameter's sub-group; a group may have several sub-groups."""
        number, _, _ = self._position(parameter)
        group: dict[str, Any] = self._zero.param_groups[self._zero.sub_group_to_group_id[number]]
        return group

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the fragments into the model's partitions and all-gather the parameters that DeepSpeed keeps whole."""
        zero = self._zero
        zero._partition_all_parameters()  # noqa: SLF001 - DeepSpeed's step does the same before it writes
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
        """Yield the gathered parameter and partition it again, with rank 0's values; communicates over all ranks."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], modifier_rank=0):
            yield parameter.detach()

    def _position(self, parameter: Any) -> tuple[int, int, int]:
        """Return the sub-group, and the fragment's offset and length in the flat tensor of the sub-group."""
        position: tuple[int, int, int] = self._zero.grad_position[self._zero.get_param_id(parameter)]
        return position


def _contains(group: dict[str, Any], parameter: Tensor) -> bool:
    return any(each is parameter for each in group["params"])


def _slices(state: State, flat: Tensor, make: Sequence[str]) -> State:
    """Return the states in the shape of `flat`, after creating those of `make` that are missing."""
    for key in make:
        if key not in state:
            state[key] = torch.zeros_like(flat, requires_grad=False)
    return {key: each for key, each in state.items() if isinstance(each, Tensor) and each.shape == flat.shape}


def find_fragments(engine: Any, rank: int) -> Fragments:
    """Return the fragments of the engine's ZeRO stage."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return ParameterFragments(engine, rank)
    return GroupFragments(engine) if stage else WholeFragments(engine)
