"""DeepSpeed as an engine for torch models: which plans it supports, and how its library is loaded.

A plan that DeepSpeed would not train as written is rejected, with a fix. Importing this module imports neither torch
nor DeepSpeed, since plans are checked before any process starts; the functions that load the library import both.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.engines.deepspeed.config import best_expressible, write_config
from shardwise.engines.deepspeed.from_json import read_json
from shardwise.engines.deepspeed.planning import deepspeed_forms, deepspeed_memory, deepspeed_time
from shardwise.engines.engine import Engine
from shardwise.environment import adopt, variables
from shardwise.errors import InputError, PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardwise.dist import World
    from shardwise.engines.deepspeed.from_json import ConfigReading
    from shardwise.job import Job
    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.cost.time import Time
    from shardwise.planner.search.engine_forms import EngineForm
    from shardwise.planner.search.question import Question
    from shardwise.plans import Plan
    from shardwise.plans.sections import DType
    from shardwise.training.build import BuildContext
    from shardwise.training.step.step import Step


OLDEST = (0, 19)
"""The oldest accepted version. The code uses private names of 0.19.8; no other version is tested."""
PIP = "pip install 'shardwise[deepspeed]'"


class DeepSpeedEngine(Engine):
    """Trains torch modules with `deepspeed.initialize`."""

    name = "deepspeed"
    title = "DeepSpeed"
    uses_fsdp = False
    replaces_parameters = True
    trains_adapters = False
    has_keyed_dropout = False
    is_slow_to_start = True
    has_fp64 = False

    def require(self) -> None:
        """Raise InputError if DeepSpeed is missing or too old."""
        require_deepspeed()

    def preload(self) -> None:
        """Import DeepSpeed once, before a fork."""
        preload_deepspeed()

    def check(self, plan: Plan) -> None:
        """Raise PlanError if DeepSpeed does not support the plan or would train it incorrectly."""
        check_deepspeed(plan)

    def plan_forms(self, question: Question) -> tuple[EngineForm, ...]:
        """Return the ZeRO stages and offload options with which DeepSpeed can train the model."""
        return deepspeed_forms(question)

    def predict_memory(self, question: Question, plan: Plan) -> Memory:
        """Return the predicted memory of one rank under DeepSpeed."""
        return deepspeed_memory(
            question.model.for_plan(plan), plan, optimizer=question.optimizer, context=question.context
        )

    def predict_time(self, question: Question, plan: Plan) -> Time:
        """Return the predicted time of one step under DeepSpeed."""
        return deepspeed_time(question.time_model(), question.model.for_plan(plan), plan)

    def read_config(
        self, path: Path, *, num_ranks: int | None, batch_size: int | None, precision: DType | None
    ) -> ConfigReading:
        """Read a plan from a JSON configuration for `deepspeed.initialize`."""
        return read_json(path, num_ranks=num_ranks, batch_size=batch_size, precision=precision)

    def write_config(self, plans: Sequence[Plan], path: Path, job: Job | None) -> tuple[Plan, list[str]]:
        """Write the first plan that DeepSpeed's JSON can express; return this plan and notes."""
        plan = best_expressible(plans)
        return plan, write_config(plan, path, job)

    def build(self, job: Job, plan: Plan, world: World, context: BuildContext) -> Step:
        """Build the Step that trains `job` under `plan`. Communicates over the world; call on every rank."""
        from shardwise.engines.deepspeed.build import build_deepspeed_step

        return build_deepspeed_step(job, plan, world, context)


_TORCH = "pass --set engine=torch"


def check_deepspeed(plan: Plan) -> None:
    """Raise PlanError if engine deepspeed does not support the plan or would train it incorrectly."""
    _check_layout(plan)
    _check_precision(plan)
    _check_offload(plan)
    default = type(plan)()
    for name in ("compile", "capture", "fused_loss"):
        if getattr(plan, name) != getattr(default, name):
            raise PlanError(
                f"engine deepspeed does not support plan {name} = {getattr(plan, name)!r}",
                code="support.deepspeed-option",
                fix=_TORCH,
            )
    for name in ("compression", "find_unused_parameters", "static_graph", "broadcast_buffers", "sync_every"):
        value = getattr(plan.communication, name)
        if value != getattr(default.communication, name):
            raise PlanError(
                f"engine deepspeed does not support plan communication.{name} = {value!r}",
                code="support.deepspeed-option",
                fix=f"remove communication.{name} from the plan, or {_TORCH}",
            )


def _check_layout(plan: Plan) -> None:
    layout = plan.layout
    for axis in ("pp", "cp", "tp"):
        if getattr(layout, axis) > 1:
            raise PlanError(
                f"plan {layout} uses axis {axis}, but engine deepspeed supports only replicate and shard",
                code="support.deepspeed-axis",
                fix=f"use --plan zero3, or {_TORCH}",
            )
    if layout.replicate > 1 and layout.shard > 1:
        raise PlanError(
            f"plan {layout} shards within replicas, but engine deepspeed shards over all ranks",
            code="support.deepspeed-partial-sharding",
            fix=f"use --plan zero3, or {_TORCH}",
        )


def _check_precision(plan: Plan) -> None:
    precision = plan.precision
    if {precision.parameter, precision.optimizer} != {"fp32"}:
        raise PlanError(
            f"engine deepspeed requires parameters and optimizer state in fp32, got {precision}",
            code="support.deepspeed-precision",
            fix=f"set precision.parameter and precision.optimizer to fp32, or {_TORCH}",
        )
    if "fp64" in (precision.compute, precision.reduce):
        raise PlanError(
            f"engine deepspeed does not support fp64, got {precision}",
            code="support.deepspeed-fp64",
            fix=f"use fp32, or {_TORCH}",
        )
    if precision.compute == "fp16" and plan.zero == 0:
        # 0.19.8 divides gradients by a loss scale that backward did not apply; Adam's normalization hides the error.
        raise PlanError(
            "DeepSpeed scales gradients incorrectly in fp16 with zero = 0",
            code="support.deepspeed-fp16-unsharded",
            fix=f"use --plan zero1 or precision bf16, or {_TORCH}",
        )


def _check_offload(plan: Plan) -> None:
    offload, alone = plan.offload, plan.layout.world_size == 1
    if offload.parameters != "none" and plan.zero != 3 and not alone:
        raise PlanError(
            f"plan offloads parameters with zero = {plan.zero}, but only zero = 3 supports it",
            code="support.offload-whole-parameters",
            fix="use --plan zero3, or offload the optimizer only",
        )
    if offload.optimizer != "none" and plan.zero == 0 and not alone:
        raise PlanError(
            "DeepSpeed does not offload the optimizer with zero = 0",
            code="support.deepspeed-offload-unsharded",
            fix="use --plan zero1",
        )
    if "nvme" not in (offload.parameters, offload.optimizer):
        return
    if plan.zero != 3:
        raise PlanError(
            f"the plan offloads to NVMe with zero = {plan.zero}, but DeepSpeed would silently offload to the CPU",
            code="support.deepspeed-nvme-stage",
            fix="use --plan zero3 on 2 ranks or more",
        )
    if offload.parameters == "nvme" and plan.precision.compute != "bf16":
        raise PlanError(
            f"the plan offloads {plan.precision.compute} parameters to NVMe, but DeepSpeed stores them in bf16",
            code="support.deepspeed-nvme-dtype",
            fix='use precision bf16, or offload.parameters = "cpu"',
        )
    if not offload.folder:
        raise PlanError(
            "plan offloads to nvme, but offload.folder is not set",
            code="plan.nvme-folder-missing",
            fix="pass --set offload.folder=PATH",
        )


# Loading of the DeepSpeed library: version check, this rank's device, and log level.


def require_deepspeed() -> None:
    """Raise InputError if DeepSpeed is missing or too old; imports neither DeepSpeed nor torch."""
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        raise InputError(
            "engine deepspeed needs DeepSpeed, which is not installed", code="extra.deepspeed-missing", fix=PIP
        ) from None
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InputError(
            f"engine deepspeed requires DeepSpeed {oldest} or newer, but {found} is installed",
            code="engine.deepspeed-too-old",
            fix=PIP,
        )


def import_deepspeed() -> Any:
    """Return the module `deepspeed` with its logging limited to errors; the first import takes 4 to 6 s."""
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    import deepspeed

    # DeepSpeed calls collectives by the names of torch 2.11, which 2.13 deprecates.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    logger.setLevel(logging.ERROR)
    return deepspeed


def preload_deepspeed() -> None:
    """Import DeepSpeed and 700 modules that its first step needs; call once, before a fork."""
    import_deepspeed()
    for name in ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3"):
        importlib.import_module(name)


def load_deepspeed(plan: Plan, device: torch.device, local_rank: int) -> Any:
    """Return the module `deepspeed`, set to this rank's device; raise if the device does not support the plan."""
    require_deepspeed()
    # DeepSpeed reads the local rank from the environment only, and forked ranks have no such variable.
    adopt({**variables(""), "LOCAL_RANK": str(local_rank if device.type == "cpu" else device.index)})
    deepspeed = import_deepspeed()
    if device.type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.accelerator.real_accelerator import set_accelerator

        set_accelerator(CPU_Accelerator())
        # DeepSpeed would compile its shared-memory collectives for 40 to 60 s; gloo is used instead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _require_device_support(plan, deepspeed)
    return deepspeed


def _require_device_support(plan: Plan, deepspeed: Any) -> None:
    """Raise PlanError if the device does not support fp16, or the machine does not support offload to nvme."""
    accelerator = deepspeed.accelerator.get_accelerator()
    if plan.precision.compute == "fp16" and not accelerator.is_fp16_supported():
        raise PlanError(
            "DeepSpeed does not support fp16 on this device",
            code="support.deepspeed-fp16-device",
            fix="use precision bf16 or fp32",
        )
    if "nvme" not in (plan.offload.parameters, plan.offload.optimizer):
        return
    if not Path(plan.offload.folder).is_dir():
        raise PlanError(
            f"plan offload.folder {plan.offload.folder} does not exist or is not a directory",
            code="plan.nvme-folder-not-found",
            fix=f"run mkdir -p {plan.offload.folder}",
        )
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import is_ninja_available

    if not (AsyncIOBuilder().is_compatible(verbose=False) and shutil.which("c++") and is_ninja_available()):
        raise PlanError(
            "offload to nvme needs libaio's headers, g++ and ninja, because DeepSpeed compiles an operator",
            code="engine.deepspeed-nvme-build",
            fix="run apt-get install libaio-dev g++ ninja-build",
        )


ENGINE = DeepSpeedEngine()
