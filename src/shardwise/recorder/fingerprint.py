"""Fingerprints of tensors: one number computed from all bits of a tensor, on the tensor's device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from zlib_ng import zlib_ng

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BLOCK = 1 << 22
"""Elements per block on a GPU; the products of a block temporarily need 32 MiB."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEYL, _MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd constants that decorrelate the factors of neighbouring elements."""


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return a fingerprint of the bits of each tensor on this rank; synchronizes with the device once.

    Equal bits have equal fingerprints. Different bits have equal fingerprints with a probability of 1 in 4e9 on the
    CPU, and less on a GPU. Fingerprints of CPU tensors and of GPU tensors cannot be compared.
    """
    found = [0] * len(tensors)
    sums: dict[int, Tensor] = {}
    factors: Tensor | None = None
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            bits = _bits(tensor)
            if bits.device.type == "cpu":
                # 10 GB/s on one core; sums of 64-bit products reach 0.4 GB/s.
                found[index] = zlib_ng.crc32(bits.view(torch.uint8).numpy())
                continue
            if factors is None:
                most = max(other.numel() for other in tensors)
                factors = position_factors(min(_BLOCK, most), bits.device)
            sums[index] = mixed_sum(bits, factors)
    if sums:
        values = torch.stack(list(sums.values())).tolist()
        for index, value in zip(sums, values, strict=True):
            found[index] = value
    return found


def combined(prints: Sequence[int]) -> int:
    """Return one fingerprint of a sequence of fingerprints."""
    return zlib_ng.crc32(b"".join(value.to_bytes(8, "little", signed=True) for value in prints))


def settings_print(groups: Sequence[Mapping[str, Any]]) -> int:
    """Return a fingerprint of the numbers and strings in an optimizer's parameter groups, such as the learning rate."""
    return zlib_ng.crc32(repr([_plain_settings(group) for group in groups]).encode())


def _plain_settings(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    plain = (int, float, str, tuple)
    return sorted((key, value) for key, value in group.items() if key != "params" and isinstance(value, plain))


def mixed_sum(bits: Tensor, factors: Tensor) -> Tensor:
    """Return the sum modulo 2**64 of flat integers, each multiplied by the factor of its position, as a device tensor.

    Factors are odd, so a change of one element always changes the sum.
    """
    blocks = [torch.sum(block * factors[: len(block)]) for block in bits.split(len(factors))]
    if len(blocks) == 1:
        return blocks[0]
    # These factors differ from those within a block, so that element 2 of block 1 and element 1 of block 2 differ.
    return torch.sum(torch.stack(blocks) * position_factors(len(blocks), bits.device, first=_BLOCK))


def position_factors(count: int, device: torch.device, *, first: int = 0) -> Tensor:
    """Return an odd 64-bit number for each of `count` positions from `first`."""
    mixed = torch.arange(first + 1, first + count + 1, device=device) * _WEYL
    mixed ^= mixed >> 31
    mixed *= _MIX
    return mixed | 1


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as flat integers, without a copy if it is contiguous."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().flatten()
    return flat.view(_INTEGERS[flat.element_size()])
