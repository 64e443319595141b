"""MLX as an engine for models that are `mlx.nn.Module`s, and the plans that it can train.

MLX trains replicas: what it cannot do, or would do otherwise than a plan says, is refused, naming the way out. Torch
and MLX are imported by methods alone: plans are checked before any process starts, and MLX does not survive a fork.
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
"""Written against this one. Ranks share the folder of the kernels that MLX compiles for a CPU: measured, up to 0.32.3 a
library stands there unfinished for 10 to 40 ms, and a rank that loads it then dies."""
_PIP = "pip install 'shardwise[mlx]'"


class MlxEngine(Engine):
    """Trains modules of MLX."""

    name = "mlx"
    title = "MLX"
    framework = "mlx"
    uses_fsdp = False
    trains_adapters = False
    has_keyed_dropout = False
    is_slow_to_start = True
    has_plain_reference = False

    def require(self) -> None:
        """Refuse to continue without an MLX that can be used."""
        try:
            found = version("mlx")
        except PackageNotFoundError:
            raise InputError(
                "engine mlx needs MLX, which is not installed", code="extra.mlx-missing", fix=_PIP
            ) from None
        if tuple(int(part) for part in found.split("+")[0].split(".")[:3]) < OLDEST_MLX:
            oldest = ".".join(map(str, OLDEST_MLX))
            raise InputError(
                f"engine mlx needs MLX {oldest} or newer, {found} is installed", code="engine.mlx-too-old", fix=_PIP
            )

    def describe(self) -> str:
        """Return MLX's version and what it computes on, such as "mlx 0.32.4 on the CPU"."""
        import mlx.core as mx

        if mx.default_device() == mx.cpu:
            return f"mlx {version('mlx')} on the CPU"
        return f"mlx {version('mlx')} on the GPU, in one memory with the CPU: more processes would share both"

    def check(self, plan: Plan) -> None:
        """Refuse a plan that MLX would train wrongly or not at all."""
        check_mlx(plan)

    def check_world(self, world: World) -> None:
        """Refuse a world on a GPU: samples reach MLX from the host."""
        if world.device.type != "cpu":
            raise PlanError(
                f"the world is on {world.device.type}, and engine mlx takes its samples from the host",
                code="support.mlx-device",
                fix="use sw.world(device='cpu')",
            )

    def require_torch_model(self, owner: str, purpose: str, *, fix: str) -> None:
        """Refuse the model, which is MLX's."""
        raise InputError(f"{purpose}, and the model of {owner} is MLX's", code="support.mlx-model", fix=fix)

    def local_device(self, asked: str | None) -> LocalDevice:
        """Return what MLX computes on, its GPU on Apple silicon: it finds that itself, and torch keeps to the CPU."""
        if asked == "cuda":
            raise LaunchError(
                "--device cuda, but the job's model is MLX's, which finds its device",
                code="support.mlx-device",
                fix="leave it out",
            )
        return LocalDevice(name="MLX", engine="mlx", default_reason="auto: MLX trains replicas")

    def world_device(self, asked: str | None) -> str:  # noqa: ARG002 - whatever was asked for
        """Return the CPU, where torch reads the samples."""
        return "cpu"

    def prepare_rank(self, backend: str | None) -> None:
        """Start MPI through MLX where the world will be over it: MLX would not join an MPI that was started before."""
        if backend == "mpi":
            from shardwise.engines.mlx.ring import mpi_group

            mpi_group()

    def build(self, job: Job, plan: Plan, world: World, context: BuildContext) -> Step:
        """Make the Step that trains `job` under `plan`; called on every rank, communicates over the world."""
        from shardwise.engines.mlx.build import build_mlx_step

        return build_mlx_step(job, plan, world, context)

    def silence_dropout(self, model: Any) -> None:
        """Have every dropout layer of MLX drop nothing."""
        from mlx import nn

        for module in model.modules():
            if isinstance(module, nn.Dropout | nn.Dropout2d | nn.Dropout3d):
                module._p_1 = 1.0  # noqa: SLF001 - the share that is kept, which MLX has under no other name

    def has_batch_norm(self, model: Any) -> bool:
        """Return whether a module normalizes by statistics of the batch."""
        from mlx import nn

        return any(isinstance(module, nn.BatchNorm) for module in model.modules())

    def observe_loss(self, observe: Callable[[Any], None], loss_sum: LossSum) -> LossSum:
        """Return `loss_sum` with a call of `observe` for each batch, as tensors; turns compilation off."""
        from shardwise.engines.mlx.adapters import observe_loss

        return observe_loss(observe, loss_sum)


_TORCH = "give the job a torch model"
_AXES = {
    "pp": "has no pipeline",
    "cp": "cuts no sequences",
    "tp": "cuts no weights",
    "shard": "shards neither optimizer nor weights",
}


def check_mlx(plan: Plan) -> None:
    """Refuse a plan for engine mlx that would train wrongly or not at all."""
    for axis, words in _AXES.items():
        if getattr(plan.layout, axis) > 1:
            raise PlanError(
                f"plan {plan.layout} uses axis {axis}, and engine mlx {words}",
                code="support.mlx-axis",
                fix="use --plan ddp",
            )
    _check_precision(plan)
    default = type(plan)()
    for name, words in _FIELDS.items():
        if getattr(plan, name) != getattr(default, name):
            raise PlanError(
                f"plan {name} = {getattr(plan, name)!r} is not for engine mlx: {words}",
                code="support.mlx-option",
                fix=_leave(name),
            )
    for name in ("parameters", "optimizer"):
        if getattr(plan.offload, name) != "none":
            raise PlanError(
                f"plan offload.{name} = {getattr(plan.offload, name)!r} is not for engine mlx, whose CPU and GPU share"
                " one memory",
                code="support.mlx-option",
                fix=_leave(f"offload.{name}"),
            )
    for name in ("compression", "find_unused_parameters", "static_graph", "broadcast_buffers", "sync_every"):
        value = getattr(plan.communication, name)
        if value != getattr(default.communication, name):
            raise PlanError(
                f"plan communication.{name} = {value!r} is not for engine mlx, which sums whole gradients in one go",
                code="support.mlx-option",
                fix=_leave(f"communication.{name}"),
            )


_FIELDS = {
    "gradient_sync": "it sums gradients once a step",
    "recompute": "wrap blocks without dropout in mx.checkpoint instead",
    "compile": "its step is always compiled",
    "capture": "it has no CUDA graphs",
    "fused_loss": "its loss sees whole outputs",
}


def _check_precision(plan: Plan) -> None:
    precision = plan.precision
    held = {precision.parameter, precision.reduce, precision.optimizer}
    if precision.compute == "fp16":
        raise PlanError(
            "plan computes in fp16, for which engine mlx scales no loss",
            code="support.mlx-fp16",
            fix="use precision bf16 or fp32",
        )
    if held not in ({"fp32"}, {"fp64"}):
        raise PlanError(
            f"plan holds {precision}, and engine mlx holds all in one dtype",
            code="support.mlx-precision",
            fix="hold parameters, gradients and optimizer in fp32",
        )
    if (held == {"fp64"}) != (precision.compute == "fp64"):
        raise PlanError(
            f"plan computes in {precision.compute} on {precision.parameter} weights",
            code="support.fp64-mix",
            fix="set every precision to fp64",
        )


def _leave(name: str) -> str:
    return f"leave {name} at its default, or {_TORCH}"


ENGINE = MlxEngine()
