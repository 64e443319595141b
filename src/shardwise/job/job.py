"""The Job: what to train, with no word about ranks."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, get_args

from shardwise.errors import JobError, nearest
from shardwise.job.callbacks import Callbacks, EarlyStopping, as_callbacks, check_callbacks
from shardwise.job.lora import Lora
from shardwise.job.losses import Loss, Metric
from shardwise.job.schedules import Constant, Schedule, is_torch_scheduler

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.utils.data import Dataset

    from shardwise.job.optimizers import OptimizerFactory


# Tensor rules in a file: written where they were confirmed, read by a Job that names it.


_FIX = "write it by shardwise verify JOB.py --propose-rules --out FILE"


def as_rules(given: Mapping[str, str] | str | None) -> Mapping[str, str] | None:
    """Return rules that are given as such, or by the path of a TOML file with a table [tensor_rules]."""
    if given is None or isinstance(given, Mapping):
        return given
    if not isinstance(given, str):
        raise JobError(
            f"Job.tensor_rules is {given!r}",
            code="job.tensor-rules-invalid",
            fix="give a dict of name patterns and styles, or a path",
        )
    try:
        rules = tomllib.loads(Path(given).read_text()).get("tensor_rules")
    except OSError:
        raise JobError(
            f"Job.tensor_rules {given} cannot be read", code="job.tensor-rules-read-failed", fix=_FIX
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(
            f"Job.tensor_rules {given} is not TOML ({error})", code="job.tensor-rules-not-toml", fix=_FIX
        ) from None
    if not isinstance(rules, dict) or not rules or not all(isinstance(style, str) for style in rules.values()):
        raise JobError(
            f"Job.tensor_rules {given} has no table [tensor_rules] of names and styles",
            code="job.tensor-rules-no-table",
            fix=_FIX,
        )
    return rules


def rules_to_toml(rules: Mapping[str, str], about: str) -> str:
    """Write rules as `as_rules` reads them, under a comment of one line."""
    lines = [f"{json.dumps(pattern)} = {json.dumps(style)}" for pattern, style in rules.items()]
    return "\n".join([f"# {about}", "[tensor_rules]", *lines]) + "\n"


LENGTHS = ("epochs", "steps", "tokens")
Masks = Literal["drawn", "keyed"]
Framework = Literal["torch", "mlx"]
"""What a model is written in; `shardwise.engines` has the engines that train it."""


def call_model(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch: a dict as keyword arguments, of a tuple all but the last entry (the target)."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch[:-1])


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train: model, data, loss, optimizer, global batch and length."""

    model: Callable[[], nn.Module]
    """Makes the model, a module of the job's engine; called on every rank after seeding."""
    data: Callable[[str], Dataset[Any] | None]
    """Split name ("train", "test") to dataset; None for a split it does not have."""
    loss: Loss
    optimizer: OptimizerFactory
    batch_size: int
    """Samples per optimizer step over the whole world; micro-batch and accumulation are the plan's."""
    epochs: int | None = None
    steps: int | None = None
    tokens: int | None = None
    """Length: exactly one of epochs, optimizer steps, or tokens (things the loss counts)."""
    forward: Callable[[nn.Module, Any], Any] = call_model
    """(model, batch) -> output."""
    weights: str | None = None
    """A torch state dict to start from."""
    schedule: Schedule = field(default_factory=Constant)
    clip_norm: float | None = None
    """Largest norm of the whole gradient; None leaves it alone."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    evaluate_every: int | None = None
    """Optimizer steps between evaluations of the test split; None evaluates after every epoch. The end is evaluated."""
    evaluate_at_start: bool = False
    """Whether the test split is evaluated before the first step, too."""
    on_step: Callbacks = None
    """Called on every rank after each step, with a CallbackContext; several in a list. May return STOP."""
    on_evaluate: Callbacks = None
    """Called on every rank after each evaluation, with a CallbackContext; such as sw.EarlyStopping("loss", 3)."""
    state: Stateful | None = None
    """What else checkpoints hold: an object with state_dict() and load_state_dict(), alike on every rank."""
    collate: Callable[[list[Any]], Any] | None = None
    """Samples to batch; None is torch's own."""
    num_workers: int = 0
    """DataLoader processes per rank."""
    seed: int = 0
    masks: Masks = "drawn"
    """How dropout and other random layers draw: by each rank, or keyed by sample and module, the same at any layout."""
    tensor_rules: Mapping[str, str] | str | None = None
    """How tensor parallelism cuts modules, by name: {"blocks.*.attn.qkv": "column", ...}, or the path of a file with
    them, which is read at once; None asks the model."""
    layers: str | None = None
    """Name of the layer list that pipelines are cut along; None finds it."""
    lora: Lora | None = None
    """Train adapters beside frozen weights; None trains all weights."""
    engine: Framework = "torch"
    """What the model is written for: a `torch.nn.Module`, or with "mlx" an `mlx.nn.Module`."""

    def __post_init__(self) -> None:
        finished = any(hasattr(self.model, name) for name in ("named_parameters", "trainable_parameters"))
        if finished and not isinstance(self.model, type):
            raise JobError(
                f"Job.model is a finished {type(self.model).__name__}",
                code="job.model-not-factory",
                fix=CALLABLES["model"],
            )
        for name in ("model", "data", "optimizer", "forward", "schedule"):
            value = getattr(self, name)
            if not callable(value) or is_torch_scheduler(value):
                raise JobError(
                    f"Job.{name} is {_described(value)}, not a function", code="job.not-callable", fix=CALLABLES[name]
                )
        if not isinstance(self.loss, Loss):
            raise JobError(
                f"Job.loss is {_described(self.loss)}, not a Loss",
                code="job.loss-not-a-loss",
                fix="give sw.losses.cross_entropy, sw.Loss(sum=..., count=...) or, of a function that returns a mean,"
                " sw.Loss.from_mean(lambda output, batch: loss(output, batch[-1]))",
            )
        _check_whole("batch_size", self.batch_size, least=1)
        _check_whole("seed", self.seed, least=0)
        _check_whole("num_workers", self.num_workers, least=0)
        self._check_choices()
        self._check_length()
        self._check_callbacks()
        object.__setattr__(self, "tensor_rules", as_rules(self.tensor_rules))
        if self.clip_norm is not None and not _positive(self.clip_norm):
            raise JobError(
                f"Job.clip_norm is {self.clip_norm!r}",
                code="job.clip-norm-invalid",
                fix="give a number above 0, or None",
            )
        for name, metric in self.metrics.items():
            if name == "loss":
                raise JobError(
                    "Job.metrics names one 'loss', which the report has already",
                    code="job.metric-name-reserved",
                    fix="give it another name",
                )
            if not isinstance(metric, Metric):
                raise JobError(
                    f"Job.metrics[{name!r}] is {_described(metric)}",
                    code="job.metric-not-a-metric",
                    fix="give sw.Metric(sum=..., count=...)",
                )
        if self.state is not None and not _is_stateful(self.state):
            raise JobError(
                f"Job.state is {_described(self.state)}",
                code="job.state-without-methods",
                fix="give an object with state_dict() and load_state_dict()",
            )
        if self.lora is not None and not isinstance(self.lora, Lora):
            raise JobError(
                f"Job.lora is {_described(self.lora)}",
                code="job.lora-not-a-lora",
                fix='give sw.Lora(targets=("q_proj", "v_proj"), rank=16)',
            )

    def _check_choices(self) -> None:
        if self.masks not in get_args(Masks):
            raise JobError(f"Job.masks is {self.masks!r}", code="job.unknown-masks", fix='give "drawn" or "keyed"')
        if self.engine not in get_args(Framework):
            names = " or ".join(f'"{name}"' for name in get_args(Framework))
            raise JobError(f"Job.engine is {self.engine!r}", code="job.unknown-engine", fix=f"give {names}")

    def _check_callbacks(self) -> None:
        if self.evaluate_every is not None:
            _check_whole("evaluate_every", self.evaluate_every, least=1)
        check_callbacks("on_step", self.on_step)
        check_callbacks("on_evaluate", self.on_evaluate)
        for callback in as_callbacks(self.on_evaluate):
            known = {"loss", *self.metrics}
            if isinstance(callback, EarlyStopping) and callback.metric not in known:
                raise JobError(
                    f"Job.on_evaluate stops by the metric {callback.metric!r}, which Job.metrics does not have",
                    code="job.early-stopping-metric",
                    fix=nearest(callback.metric, known),
                )

    def _check_length(self) -> None:
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "no length"
            raise JobError(
                f"the job gives {said}",
                code="job.one-length-needed",
                fix="give exactly one of epochs=, steps=, tokens=",
            )
        _check_whole(given[0], getattr(self, given[0]), least=1)


CALLABLES = {
    # Fields that are functions, and what to write in them.
    "model": "give a function that makes the model, such as lambda: Net()",
    "data": "give a function from a split name to a dataset, such as sw.datasets.digits",
    "optimizer": "give a factory such as sw.adamw(lr=1e-3), or lambda named: torch.optim.SGD(named, lr=0.1)",
    "forward": "give a function (model, batch) -> output",
    "schedule": "give a function (step, total) -> factor, such as sw.schedules.Cosine()",
}

_LONGEST = 80
"""Characters of a value that a refusal quotes."""


def _check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise JobError(
            f"Job.{name} is {value!r}", code="job.not-whole-number", fix=f"give a whole number of at least {least}"
        )


def _described(value: object) -> str:
    """Return a value in one short line: its repr, or its class where the repr is long or only an address."""
    text = repr(value)
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    if "\n" in text or " at 0x" in text or len(text) > _LONGEST:
        return f"an instance of {type(value).__name__}"
    return text


def _is_stateful(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
