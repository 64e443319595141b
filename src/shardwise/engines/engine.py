"""The Engine protocol: everything that differs between what trains a model, asked through one object.

A Job names the framework that its model is written in (`Job(engine="mlx")`), a Plan names the engine that trains it;
the two differ only for DeepSpeed, which trains torch modules. An engine is found by name in the table below and is
imported when it is asked for, so that a rank of torch imports neither DeepSpeed nor MLX. Every other package calls a
method or reads a capability of the engine that it was given: outside `engines/` no code compares an engine's name.

This module imports no torch, and neither does any module in the table: the launcher's process asks them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shardwise.dist import World
    from shardwise.engines.deepspeed.from_json import ConfigReading
    from shardwise.job import Job
    from shardwise.planner.search.deepspeed import ZeroForm
    from shardwise.planner.search.search import Question
    from shardwise.planner.settle import LocalDevice
    from shardwise.plans import Plan
    from shardwise.plans.plan import DType
    from shardwise.training.build import BuildContext
    from shardwise.training.step.step import Step

    LossSum = Callable[[Any, Any], Any]

_TABLE = {
    "torch": "shardwise.engines.engine",
    "deepspeed": "shardwise.engines.deepspeed.engine",
    "mlx": "shardwise.engines.mlx.engine",
}
"""The module of each engine, which has it as ENGINE."""


class Engine:
    """What trains a model: torch's own wrappers, which are built in; other engines override what they do otherwise."""

    name: ClassVar[str] = "torch"
    """What plans call it."""
    title: ClassVar[str] = "PyTorch"
    """What messages call it."""
    framework: ClassVar[str] = "torch"
    """What its models are written in: the engine of a Job."""
    uses_fsdp: ClassVar[bool] = True
    """Whether it shards parameters, gradients and optimizer states by torch's own wrappers, as DTensors."""
    replaces_parameters: ClassVar[bool] = False
    """Whether hooks and second references of a parameter are lost under every plan."""
    trains_adapters: ClassVar[bool] = True
    """Whether Job.lora is for it."""
    has_keyed_dropout: ClassVar[bool] = True
    """Whether Job.masks="keyed" is for it."""
    is_slow_to_start: ClassVar[bool] = False
    """Whether its first step compiles or imports, and so takes much longer than the others."""
    has_fp64: ClassVar[bool] = True
    """Whether `verify` can compare it in fp64."""
    has_plain_reference: ClassVar[bool] = True
    """Whether `verify` compares it with a loop in plain PyTorch; else with the engine itself in one process."""

    def require(self) -> None:
        """Refuse to continue where its library is missing or too old; imports nothing heavy."""

    def preload(self) -> None:
        """Import what every rank would import, once, before a fork."""

    def describe(self) -> str:
        """Return the engine with its version and device, for the start report."""
        return self.name

    def check(self, plan: Plan) -> None:
        """Refuse a plan that it would train wrongly or not at all, naming the rule and the way out."""
        from shardwise.parallel.support import check_native

        check_native(plan)

    def check_world(self, world: World) -> None:
        """Refuse a world on whose device it cannot train."""

    def require_torch_model(self, owner: str, purpose: str, *, fix: str) -> None:
        """Refuse a model that is not torch's, where `purpose` needs one; `owner` names whose model it is."""

    def local_device(self, asked: str | None) -> LocalDevice | None:  # noqa: ARG002 - for engines that find theirs
        """Return the device to settle a plan for, given --device; None where that is found by looking for GPUs."""
        return None

    def world_device(self, asked: str | None) -> str | None:
        """Return the device that the ranks' world is on, given --device."""
        return asked

    def prepare_rank(self, backend: str | None) -> None:
        """Do what must come before this rank's world of `backend` starts; called on every rank."""

    def build(self, job: Job, plan: Plan, world: World, context: BuildContext) -> Step:
        """Make the Step that trains `job` under `plan`; called on every rank, communicates over the world."""
        from shardwise.training.build import build_torch_step

        return build_torch_step(job, plan, world, context)

    def plan_forms(self, question: Question) -> tuple[ZeroForm, ...]:  # noqa: ARG002 - for engines that have some
        """Return the engine's own ways to train the model of a search, each with its memory and time."""
        return ()

    def read_config(
        self, path: Path, *, num_ranks: int | None, batch_size: int | None, precision: DType | None
    ) -> ConfigReading:
        """Return the plan in a configuration file of the engine; the arguments fill in what the file leaves open."""
        raise NotImplementedError

    def write_config(self, plans: Sequence[Plan], path: Path, job: Job | None) -> tuple[Plan, list[str]]:
        """Write the first plan that the engine's configuration file can express; return it, and notes on the file."""
        raise NotImplementedError

    def silence_dropout(self, model: Any) -> None:
        """Have dropout layers drop nothing, where their probability is not an attribute that `verify` finds."""

    def has_batch_norm(self, model: Any) -> bool:
        """Return whether a module normalizes by statistics of the batch."""
        from shardwise.torch_private.modules import BatchNormBase

        return any(isinstance(module, BatchNormBase) for module in model.modules())

    def observe_loss(self, observe: Callable[[Any], None], loss_sum: LossSum) -> LossSum:
        """Return `loss_sum` with a call of `observe` for each batch, whose leaves are tensors."""

        def observed(output: Any, batch: Any) -> Any:
            observe(batch)
            return loss_sum(output, batch)

        return observed


ENGINE = Engine()


def engine_named(name: str) -> Engine:
    """Return the engine of this name, imported when it is first asked for; it imports no torch."""
    engine: Engine = import_module(_TABLE[name]).ENGINE
    return engine


def engine_for(job: Job, plan: Plan) -> Engine:
    """Return the engine that trains `job` under `plan`; one for models of another framework is refused."""
    engine = engine_named(plan.engine)
    if engine.framework != job.engine:
        raise JobError(
            f"the plan has engine {plan.engine}, and the job's model is written for {job.engine}",
            code="job.engine-mismatch",
            fix=f'leave engine out of the plan, or give Job(engine="{engine.framework}") such a model',
        )
    return engine
