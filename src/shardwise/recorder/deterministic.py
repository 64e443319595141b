"""Determinism: two runs of one program come to the same bits, or the operation that cannot is refused by name."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

from shardwise.environment import adopt, variables
from shardwise.recorder.imports import when_imported

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLES = {
    # cuBLAS takes whatever work space is free, and sums by what it has got; this gives each stream its own.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL chooses anew by size and topology, and switches that sum do so in the order of arrival; a ring has one order.
    "NCCL_ALGO": "Ring",
    # The order in which sets of words are gone through; read when an interpreter starts.
    "PYTHONHASHSEED": "0",
}


def deterministic_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a deterministic rank needs beside its own variables, which stay."""
    return {name: value for name, value in _VARIABLES.items() if name not in environ}


def be_deterministic(seed: int | None) -> None:
    """Have this process compute the same whenever it runs; before CUDA is touched, torch may be imported or not.

    Operations of torch without a deterministic form raise an error with their name. `seed` is for Python, numpy and
    torch; None leaves that to the program.
    """
    own = variables("")
    adopt({**own, **deterministic_variables(own)})
    actions = {"torch": lambda: _settle_torch(seed)}
    if seed is not None:
        random.seed(seed)
        actions["numpy"] = lambda: sys.modules["numpy"].random.seed(seed)
    when_imported(actions)


def _settle_torch(seed: int | None) -> None:
    import torch

    torch.use_deterministic_algorithms(True)  # noqa: FBT003 - torch's own signature
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if seed is not None:
        torch.manual_seed(seed)
