"""MLX as an engine for models that are `mlx.nn.Module`s, and the plans that it supports.

MLX trains with data parallelism only; a plan that it would not train as written is rejected, with a fix. Importing this
module imports neither torch nor MLX: plans are checked before any process starts, and MLX does not survive a fork.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from shardwise.engines.engine import Engine
from shardwise.errors import InputError, LaunchError, PlanError
from shardwise.planner.settle import LocalDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.dist import World
    from shardwise.engines.engine import LossSum
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.build import BuildContext
    from shardwise.training.step.step import Step

OLDEST_MLX = (0, 32, 4)
"""The oldest supported version. Ranks share the folder of the kernels that MLX compiles for a CPU: up to 0.32.3 an
incomplete library is visible there for 10 to 40 ms (measured), and a rank that loads it crashes."""
_PIP = "pip install 'shardwise[mlx]'"


class MlxEngine(Engine):
    """Trains `mlx.nn.Module`s."""

    name = "mlx"
    title = "MLX"
    framework = "mlx"
    uses_fsdp = False
    is_predicted = False
    trains_adapters = False
    has_keyed_dropout = False
    is_slow_to_start = True
    has_plain_reference = False

    def require(self) -> None:
        """Raise InputError if MLX is missing or too old."""
        try:
            found = version("mlx")
        except PackageNotFoundError:
            raise InputError(
                "engine mlx needs MLX, which is not installed", code="extra.mlx-missing", fix=_PIP
            ) from None
        if tuple(int(part) for part in found.split("+")[0].split(".")[:3]) < OLDEST_MLX:
            oldest = ".".join(map(str, OLDEST_MLX))
            raise InputError(
                f"engine mlx requires MLX {oldest} or newer, but {found} is installed",
                code="engine.mlx-too-old",
                fix=_PIP,
            )

    def describe(self) -> str:
        """Return MLX's version and device, such as "mlx 0.32.4 on the CPU"."""
        import mlx.core as mx

        if mx.default_device() == mx.cpu:
            return f"mlx {version('mlx')} on the CPU"
        return f"mlx {version('mlx')} on the GPU, which shares its memory with the CPU and all processes"

    def check(self, plan: Plan) -> None:
        """Raise PlanError if MLX does not support the plan or would train it incorrectly."""
        check_mlx(plan)

    def check_world(self, world: World) -> None:
        """Raise PlanError if the world is not on the CPU: MLX copies samples from host memory."""
        if world.device.type != "cpu":
            raise PlanError(
                f"engine mlx reads samples from host memory, but the world is on {world.device.type}",
                code="support.mlx-device",
                fix="use sw.world(device='cpu')",
            )

    def require_torch_model(self, owner: str, purpose: str, *, fix: str) -> None:
        """Raise InputError, because the model is an MLX module."""
        raise InputError(f"{purpose}, but the model of {owner} is an MLX module", code="support.mlx-model", fix=fix)

    def local_device(self, requested: str | None) -> LocalDevice:
        """Return MLX's device, which MLX chooses: the GPU on Apple silicon. Torch stays on the CPU."""
        if requested == "cuda":
            raise LaunchError(
                "--device cuda does not apply to an MLX model: MLX chooses its device",
                code="support.mlx-device",
                fix="remove --device",
            )
        return LocalDevice(name="MLX", engine="mlx", default_reason="auto: MLX trains replicas")

    def world_device(self, requested: str | None) -> str:  # noqa: ARG002 - the CPU is the only choice
        """Return the CPU, where torch loads the samples."""
        return "cpu"

    def prepare_rank(self, backend: str | None) -> None:
        """Initialize MPI through MLX if the backend is mpi: MLX cannot use an MPI that another library initialized."""
        if backend == "mpi":
            from shardwise.engines.mlx.ring import mpi_group

            mpi_group()

    def build(self, job: Job, plan: Plan, world: World, context: BuildContext) -> Step:
        """Build the Step that trains `job` under `plan`. Communicates over the world; call on every rank."""
        from shardwise.engines.mlx.step import build_mlx_step

        return build_mlx_step(job, plan, world, context)

    def silence_dropout(self, model: Any) -> None:
        """Disable every dropout layer of an MLX model."""
        from mlx import nn

        for module in model.modules():
            if isinstance(module, nn.Dropout | nn.Dropout2d | nn.Dropout3d):
                module._p_1 = 1.0  # noqa: SLF001 - the keep probability, which has no public name

    def has_batch_norm(self, model: Any) -> bool:
        """Return whether a module normalizes by batch statistics."""
        from mlx import nn

        return any(isinstance(module, nn.BatchNorm) for module in model.modules())

    def observe_loss(self, observe: Callable[[Any], None], loss_sum: LossSum) -> LossSum:
        """Return a function that calls `observe` with each batch of tensors before `loss_sum`; disables compilation."""
        from shardwise.engines.mlx.functions import observe_loss

        return observe_loss(observe, loss_sum)


_TORCH = "use a torch model"
_AXES = {
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "tp": "tensor parallelism",
    "shard": "sharding of parameters or optimizer states",
}


def check_mlx(plan: Plan) -> None:
    """Raise PlanError if engine mlx does not support the plan or would train it incorrectly."""
    for axis, technique in _AXES.items():
        if getattr(plan.layout, axis) > 1:
            raise PlanError(
                f"plan {plan.layout} uses axis {axis}, but engine mlx does not support {technique}",
                code="support.mlx-axis",
                fix="use --plan ddp",
            )
    _check_precision(plan)
    default = type(plan)()
    for name, reason in _FIELDS.items():
        if getattr(plan, name) != getattr(default, name):
            raise PlanError(
                f"engine mlx does not support plan {name} = {getattr(plan, name)!r}: {reason}",
                code="support.mlx-option",
                fix=_leave(name),
            )
    for name in ("parameters", "optimizer"):
        if getattr(plan.offload, name) != "none":
            raise PlanError(
                f"engine mlx does not support plan offload.{name} = {getattr(plan.offload, name)!r}: its CPU and GPU"
                " share memory",
                code="support.mlx-option",
                fix=_leave(f"offload.{name}"),
            )
    for name in ("compression", "find_unused_parameters", "static_graph", "broadcast_buffers", "sync_every"):
        value = getattr(plan.communication, name)
        if value != getattr(default.communication, name):
            raise PlanError(
                f"engine mlx does not support plan communication.{name} = {value!r}",
                code="support.mlx-option",
                fix=_leave(f"communication.{name}"),
            )


_FIELDS = {
    "gradient_sync": "it reduces gradients once per step",
    "recompute": "wrap blocks without dropout in mx.checkpoint instead",
    "compile": "its step is always compiled",
    "capture": "it has no CUDA graphs",
    "fused_loss": "its loss needs the full logits",
}


def _check_precision(plan: Plan) -> None:
    precision = plan.precision
    stored = {precision.parameter, precision.reduce, precision.optimizer}
    if precision.compute == "fp16":
        raise PlanError(
            "engine mlx does not support fp16: it has no loss scaling",
            code="support.mlx-fp16",
            fix="use precision bf16 or fp32",
        )
    if stored not in ({"fp32"}, {"fp64"}):
        raise PlanError(
            f"engine mlx requires one dtype for parameters, gradients and optimizer, got {precision}",
            code="support.mlx-precision",
            fix="set precision.parameter, precision.reduce and precision.optimizer to fp32",
        )
    if (stored == {"fp64"}) != (precision.compute == "fp64"):
        raise PlanError(
            f"engine mlx cannot compute in {precision.compute} with {precision.parameter} parameters",
            code="support.fp64-mix",
            fix="set every precision to fp64",
        )


def _leave(name: str) -> str:
    return f"leave {name} at its default, or {_TORCH}"


ENGINE = MlxEngine()
