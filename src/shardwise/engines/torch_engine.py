"""The engine that is built in: torch's own wrappers, as `parallel/apply.py` orders them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.parallel.support import check_native

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.planner.settle import LocalDevice
    from shardwise.plans import Plan
    from shardwise.training.build import BuildContext
    from shardwise.training.step.step import Step


class TorchEngine:
    """Trains torch modules; engines that train them too inherit what they have in common."""

    name = "torch"
    title = "PyTorch"
    framework = "torch"
    uses_fsdp = True
    replaces_parameters = False
    trains_adapters = True
    has_keyed_dropout = True
    is_slow_to_start = False
    has_fp64 = True
    has_plain_reference = True

    def require(self) -> None:
        """Accept: shardwise itself needs torch."""

    def preload(self) -> None:
        """Import nothing: the fork parent has torch already."""

    def describe(self) -> str:
        """Return the engine's name."""
        return self.name

    def check(self, plan: Plan) -> None:
        """Refuse a plan that would train wrongly or not at all."""
        check_native(plan)

    def check_world(self, world: World) -> None:
        """Accept any device of torch."""

    def require_torch_model(self, owner: str, purpose: str, *, fix: str) -> None:
        """Accept: the model is torch's."""

    def local_device(self, asked: str | None) -> LocalDevice | None:  # noqa: ARG002 - the caller looks for GPUs
        """Return None: the plan is for the GPUs of this machine, or its CPU."""
        return None

    def world_device(self, asked: str | None) -> str | None:
        """Return the device as asked for."""
        return asked

    def prepare_rank(self, backend: str | None) -> None:
        """Do nothing: the world starts its process group by itself."""

    def build(self, job: Job, plan: Plan, world: World, context: BuildContext) -> Step:
        """Make the Step that trains `job` under `plan`; called on every rank, communicates over the world."""
        from shardwise.training.build import build_torch_step

        return build_torch_step(job, plan, world, context)

    def silence_dropout(self, model: Any) -> None:
        """Do nothing: probabilities of torch's layers are attributes that `verify` sets itself."""

    def has_batch_norm(self, model: Any) -> bool:
        """Return whether a module normalizes by statistics of the batch."""
        from shardwise.torch_private.modules import BatchNormBase

        return any(isinstance(module, BatchNormBase) for module in model.modules())

    def observe_loss(
        self, observe: Callable[[Any], None], loss_sum: Callable[[Any, Any], Any]
    ) -> Callable[[Any, Any], Any]:
        """Return `loss_sum` with a call of `observe` for each batch."""

        def observed(output: Any, batch: Any) -> Any:
            observe(batch)
            return loss_sum(output, batch)

        return observed


ENGINE = TorchEngine()
