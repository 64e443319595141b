"""The Engine interface, which contains all behaviour that differs between torch, DeepSpeed and MLX.

A Job names the framework of its model (`Job(engine="mlx")`), a Plan names the engine that trains it; the two names
differ only for DeepSpeed, which trains torch modules. `engine_named` looks an engine up in the table below and imports
its module on first use, so a rank that trains with torch imports neither DeepSpeed nor MLX. Other packages call methods
and read capabilities of an Engine; no code outside `engines/` compares the names of engines.

Neither this module nor any module in the table imports torch, since the launcher's process uses them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from shardwise.errors import JobError
from shardwise.parallel.support import check_native

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shardwise.dist import World
    from shardwise.engines.deepspeed.from_json import ConfigReading
    from shardwise.job import Job
    from shardwise.planner.cost.memory import Memory
    from shardwise.planner.cost.time import Time
    from shardwise.planner.search.engine_forms import EngineForm
    from shardwise.planner.search.question import Question
    from shardwise.planner.settle import LocalDevice
    from shardwise.plans import Plan
    from shardwise.plans.sections import DType
    from shardwise.training.build import BuildContext
    from shardwise.training.step.step import Step

    LossSum = Callable[[Any, Any], Any]

_TABLE = {
    "torch": "shardwise.engines.engine",
    "deepspeed": "shardwise.engines.deepspeed.engine",
    "mlx": "shardwise.engines.mlx.engine",
}
"""The module of each engine, which defines it as ENGINE."""


class Engine:
    """The interface of all engines, with the behaviour of torch's own wrappers; other engines override methods."""

    name: ClassVar[str] = "torch"
    """Name of the engine in plans."""
    title: ClassVar[str] = "PyTorch"
    """Name of the engine in messages."""
    framework: ClassVar[str] = "torch"
    """Framework of the models that it trains, equal to `Job.engine`."""
    uses_fsdp: ClassVar[bool] = True
    """Whether it shards parameters, gradients and optimizer states with torch's own wrappers, as DTensors."""
    replaces_parameters: ClassVar[bool] = False
    """Whether every plan replaces parameters, so that hooks on them and additional references to them are lost."""
    trains_adapters: ClassVar[bool] = True
    """Whether it supports `Job.lora`."""
    has_keyed_dropout: ClassVar[bool] = True
    """Whether it supports `Job(masks="keyed")`, counter-based dropout."""
    is_slow_to_start: ClassVar[bool] = False
    """Whether its first step compiles or imports modules and takes much longer than later steps."""
    has_fp64: ClassVar[bool] = True
    """Whether `verify` can compare it in fp64."""
    is_predicted: ClassVar[bool] = True
    """Whether `plan` predicts the memory and time of its plans."""
    has_plain_reference: ClassVar[bool] = True
    """Whether `verify` compares it with a loop in plain PyTorch; if not, with the engine itself in one process."""

    def require(self) -> None:
        """Raise InputError if the engine's library is missing or too old; does not import the library."""

    def preload(self) -> None:
        """Import, once before a fork, the modules that every rank needs."""

    def describe(self) -> str:
        """Return the engine's name, with version and device if relevant, for the start report."""
        return self.name

    def check(self, plan: Plan) -> None:
        """Raise PlanError if the engine does not support the plan or would train it incorrectly."""
        check_native(plan)

    def check_world(self, world: World) -> None:
        """Raise PlanError if the engine cannot train on the world's device."""

    def require_torch_model(self, owner: str, purpose: str, *, fix: str) -> None:
        """Raise InputError if the engine's models are not torch modules; `owner` and `purpose` are for the message."""

    def local_device(self, requested: str | None) -> LocalDevice | None:  # noqa: ARG002 - other engines use it
        """Return the device for which to resolve a plan, given --device; None means that the caller probes for GPUs."""
        return None

    def world_device(self, requested: str | None) -> str | None:
        """Return the device of the world, given --device."""
        return requested

    def prepare_rank(self, backend: str | None) -> None:
        """Set up this rank before its world starts with `backend`; call on every rank."""

    def build(self, job: Job, plan: Plan, world: World, context: BuildContext) -> Step:
        """Build the Step that trains `job` under `plan`. Communicates over the world; call on every rank."""
        from shardwise.training.build import build_torch_step

        return build_torch_step(job, plan, world, context)

    def plan_forms(self, question: Question) -> tuple[EngineForm, ...]:  # noqa: ARG002 - other engines use it
        """Return the engine's own configurations for the model of a search, each with its memory and time."""
        return ()

    def predict_memory(self, question: Question, plan: Plan) -> Memory:
        """Return the predicted memory of one rank under a plan of this engine."""
        return question.memory_of(plan)

    def predict_time(self, question: Question, plan: Plan) -> Time:
        """Return the predicted time of one step under a plan of this engine."""
        return question.time_model().predict(question.model.for_plan(plan), plan)

    def read_config(
        self, path: Path, *, num_ranks: int | None, batch_size: int | None, precision: DType | None
    ) -> ConfigReading:
        """Read a plan from a configuration file of the engine; the arguments supply values that the file omits."""
        raise NotImplementedError

    def write_config(self, plans: Sequence[Plan], path: Path, job: Job | None) -> tuple[Plan, list[str]]:
        """Write the first plan that the engine's configuration file can express; return this plan and notes."""
        raise NotImplementedError

    def silence_dropout(self, model: Any) -> None:
        """Disable dropout layers whose probability is not an attribute that `verify` can set."""

    def has_batch_norm(self, model: Any) -> bool:
        """Return whether a module normalizes by batch statistics."""
        from shardwise.torch_private.dispatch import BatchNormBase

        return any(isinstance(module, BatchNormBase) for module in model.modules())

    def observe_loss(self, observe: Callable[[Any], None], loss_sum: LossSum) -> LossSum:
        """Return a function that calls `observe` with each batch of tensors before `loss_sum`."""

        def observed(output: Any, batch: Any) -> Any:
            observe(batch)
            return loss_sum(output, batch)

        return observed


ENGINE = Engine()


def engine_named(name: str) -> Engine:
    """Return the engine of this name, importing its module on first use; does not import torch."""
    engine: Engine = import_module(_TABLE[name]).ENGINE
    return engine


def require_supported(plan: Plan) -> None:
    """Raise PlanError if the plan's engine does not support the plan."""
    engine_named(plan.engine).check(plan)


def engine_for(job: Job, plan: Plan) -> Engine:
    """Return the engine that trains `job` under `plan`; raise JobError if the job's model is of another framework."""
    engine = engine_named(plan.engine)
    if engine.framework != job.engine:
        raise JobError(
            f"the plan has engine {plan.engine}, but the job's model is written for {job.engine}",
            code="job.engine-mismatch",
            fix=f'remove engine from the plan, or set Job(engine="{engine.framework}") with a model of that framework',
        )
    return engine
