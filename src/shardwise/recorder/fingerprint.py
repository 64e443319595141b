"""Fingerprints of tensors: one number for all bits of each, taken where the tensor is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from zlib_ng import zlib_ng

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BLOCK = 1 << 22
"""Elements at once on a GPU: their products take 32 MiB for a moment."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEYL, _MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd numbers without pattern: factors of neighbouring elements have nothing in common."""


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return a fingerprint of each tensor's bits on this rank; waits for the device once.

    Equal bits have equal ones; others have not, but for one case in 4e9 on the host and fewer on a GPU. Those of host
    and GPU cannot be compared.
    """
    found = [0] * len(tensors)
    sums: dict[int, Tensor] = {}
    factors: Tensor | None = None
    with torch.no_grad():
        for place, tensor in enumerate(tensors):
            bits = _bits(tensor)
            if bits.device.type == "cpu":
                # 10 GB/s on one core, where sums of 64-bit products have 0.4.
                found[place] = zlib_ng.crc32(bits.view(torch.uint8).numpy())
                continue
            if factors is None:
                factors = position_factors(min(_BLOCK, max(each.numel() for each in tensors)), bits.device)
            sums[place] = mixed_sum(bits, factors)
    if sums:
        for place, value in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True):
            found[place] = value
    return found


def combined(prints: Sequence[int]) -> int:
    """Return one fingerprint of many, in their order."""
    return zlib_ng.crc32(b"".join(value.to_bytes(8, "little", signed=True) for value in prints))


def settings_print(groups: Sequence[Mapping[str, Any]]) -> int:
    """Return a fingerprint of the numbers and strings in an optimizer's groups, such as its learning rate."""
    return zlib_ng.crc32(repr([_plain_settings(group) for group in groups]).encode())


def _plain_settings(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    plain = (int, float, str, tuple)
    return sorted((key, value) for key, value in group.items() if key != "params" and isinstance(value, plain))


def mixed_sum(bits: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of flat integers, each times the factor of its place, modulo 2**64; stays on the device.

    Factors are odd, so a change of one element always shows.
    """
    blocks = [torch.sum(block * factors[: len(block)]) for block in bits.split(len(factors))]
    if len(blocks) == 1:
        return blocks[0]
    # Other factors than inside a block, else place 2 of block 1 and place 1 of block 2 would have the same.
    return torch.sum(torch.stack(blocks) * position_factors(len(blocks), bits.device, first=_BLOCK))


def position_factors(count: int, device: torch.device, *, first: int = 0) -> Tensor:
    """Return an odd 64-bit number for each of `count` places from the `first` on."""
    mixed = torch.arange(first + 1, first + count + 1, device=device) * _WEYL
    mixed ^= mixed >> 31
    mixed *= _MIX
    return mixed | 1


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as flat integers, without a copy where it is contiguous."""
    tensor = tensor.detach()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().flatten()
    return flat.view(_INTEGERS[flat.element_size()])
