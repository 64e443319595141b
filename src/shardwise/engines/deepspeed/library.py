"""DeepSpeed itself: there, new enough, on this rank's device, and quiet."""

from __future__ import annotations

import importlib
import logging
import shutil
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.environment import adopt, variables
from shardwise.errors import InputError, PlanError

if TYPE_CHECKING:
    import torch

    from shardwise.plans import Plan

OLDEST = (0, 19)
"""Written against 0.19.8 and its inner names, tried with no other."""
PIP = "pip install 'shardwise[deepspeed]'"


def require_deepspeed() -> None:
    """Refuse to go on without a DeepSpeed that can be used; imports neither it nor torch."""
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        raise InputError(
            "engine deepspeed needs DeepSpeed, which is not installed", code="extra.deepspeed-missing", fix=PIP
        ) from None
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InputError(
            f"engine deepspeed needs DeepSpeed {oldest} or newer, {found} is installed",
            code="engine.deepspeed-too-old",
            fix=PIP,
        )


def import_deepspeed() -> Any:
    """Return the module `deepspeed` without its lines of progress and advice; takes 4 to 6 s the first time."""
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    import deepspeed

    # What torch 2.13 renamed, DeepSpeed calls by the names that 2.11 has.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    logger.setLevel(logging.ERROR)
    return deepspeed


def preload_deepspeed() -> None:
    """Import DeepSpeed and what it imports on its way into a first step, 700 modules more; before a fork, once."""
    import_deepspeed()
    for name in ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3"):
        importlib.import_module(name)


def load_deepspeed(plan: Plan, device: torch.device, local_rank: int) -> Any:
    """Return the module `deepspeed`, set to this rank's device; refuses what that cannot compute."""
    require_deepspeed()
    # DeepSpeed reads the place of a rank from nowhere else, and a forked rank was never told by a launcher.
    adopt({**variables(""), "LOCAL_RANK": str(local_rank if device.type == "cpu" else device.index)})
    deepspeed = import_deepspeed()
    if device.type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.accelerator.real_accelerator import set_accelerator

        set_accelerator(CPU_Accelerator())
        # Its collectives through shared memory would be compiled first, for 40 to 60 s; gloo serves.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _require_kernels(plan, deepspeed)
    return deepspeed


def _require_kernels(plan: Plan, deepspeed: Any) -> None:
    """Refuse what this machine cannot compute, and a disk that it cannot use."""
    accelerator = deepspeed.accelerator.get_accelerator()
    if plan.precision.compute == "fp16" and not accelerator.is_fp16_supported():
        raise PlanError(
            "this device does not compute in fp16 under DeepSpeed",
            code="support.deepspeed-fp16-device",
            fix="use precision bf16 or fp32",
        )
    if "nvme" not in (plan.offload.parameters, plan.offload.optimizer):
        return
    if not Path(plan.offload.folder).is_dir():
        raise PlanError(
            f"plan offload.folder {plan.offload.folder} is no folder",
            code="plan.nvme-folder-not-found",
            fix="make it first",
        )
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import is_ninja_available

    if not (AsyncIOBuilder().is_compatible(verbose=False) and shutil.which("c++") and is_ninja_available()):
        raise PlanError(
            "plan offloads to nvme, for which DeepSpeed compiles an operator (once, minutes), and libaio's headers, g++"
            " or ninja is missing",
            code="engine.deepspeed-nvme-build",
            fix="apt-get install libaio-dev g++ ninja-build",
        )
