"""The Job: model, data, loss, optimizer, global batch size and length of a training, independent of ranks."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, get_args

from shardwise.errors import JobError, nearest
from shardwise.job.callbacks import Callbacks, EarlyStopping, as_callbacks, check_callbacks
from shardwise.job.lora import Lora
from shardwise.job.losses import Loss, Metric
from shardwise.job.schedules import Constant, Schedule, is_torch_scheduler
from shardwise.spec import local_path

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.utils.data import Dataset

    from shardwise.job.optimizers import OptimizerFactory


# Tensor-parallel rules in a TOML file, as `shardwise verify --propose-rules` writes it.


_FIX = "write the file with shardwise verify JOB.py --propose-rules --out FILE"
FOLDER: ContextVar[Path | None] = ContextVar("FOLDER", default=None)
"""Folder of the job file that is being loaded, in which a relative path is searched before the current directory."""


def as_rules(given: Mapping[str, str] | str | None) -> Mapping[str, str] | None:
    """Return tensor-parallel rules, read from the table [tensor_rules] of a TOML file if `given` is its path."""
    if given is None or isinstance(given, Mapping):
        return given
    if not isinstance(given, str):
        raise JobError(
            f"Job.tensor_rules must be a dict or a path, got {given!r}",
            code="job.tensor-rules-invalid",
            fix="pass a dict of name patterns and styles, or a path",
        )
    tried = dict.fromkeys((folder / given).absolute() for folder in (FOLDER.get() or Path(), Path()))
    path = next((each for each in tried if each.exists()), Path(given))
    try:
        rules = tomllib.loads(path.read_text()).get("tensor_rules")
    except OSError:
        raise JobError(
            f"Job.tensor_rules file {given} cannot be read (tried {' and '.join(map(str, tried))})",
            code="job.tensor-rules-read-failed",
            fix=_FIX,
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(
            f"Job.tensor_rules file {given} is not valid TOML ({error})", code="job.tensor-rules-not-toml", fix=_FIX
        ) from None
    if not isinstance(rules, dict) or not rules or not all(isinstance(style, str) for style in rules.values()):
        raise JobError(
            f"Job.tensor_rules file {given} has no table [tensor_rules] of name patterns and styles",
            code="job.tensor-rules-no-table",
            fix=_FIX,
        )
    return rules


def rules_to_toml(rules: Mapping[str, str], about: str) -> str:
    """Return rules as TOML for `as_rules`, below a comment with the line `about`."""
    lines = [f"{json.dumps(pattern)} = {json.dumps(style)}" for pattern, style in rules.items()]
    return "\n".join([f"# {about}", "[tensor_rules]", *lines]) + "\n"


LENGTHS = ("epochs", "steps", "tokens")
Masks = Literal["drawn", "keyed"]
Framework = Literal["torch", "mlx"]
"""Framework of a model; `shardwise.engines` has the engines that train it."""


def call_model(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch: a dict as keyword arguments, a tuple without its last entry (the target)."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch[:-1])


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job: model, data, loss, optimizer, global batch size and length."""

    model: Callable[[], nn.Module]
    """Returns the model, a module of the job's engine; called on every rank after seeding."""
    data: Callable[[str], Dataset[Any] | None]
    """Returns the dataset of a split ("train" or "test"), or None if the job does not have the split."""
    loss: Loss
    optimizer: OptimizerFactory
    batch_size: int
    """Global batch size: samples per optimizer step over all ranks. The plan sets micro-batch and accumulation."""
    epochs: int | None = None
    steps: int | None = None
    tokens: int | None = None
    """Length of the training: exactly one of epochs, optimizer steps and tokens (as counted by `Loss.count`)."""
    forward: Callable[[nn.Module, Any], Any] = call_model
    """(model, batch) -> output."""
    weights: str | None = None
    """Path of the initial weights: a state dict, a safetensors file, a Hugging Face folder, or a run directory."""
    schedule: Schedule = field(default_factory=Constant)
    clip_norm: float | None = None
    """Maximum total norm of all gradients; None disables clipping."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    evaluate_every: int | None = None
    """Optimizer steps between evaluations of the test split (None: one epoch); the last step is always evaluated."""
    evaluate_at_start: bool = False
    """Whether to evaluate the test split also before the first step."""
    on_step: Callbacks = None
    """A callback or a list, called with a CallbackContext on every rank after each step; may return STOP."""
    on_evaluate: Callbacks = None
    """A callback or a list, called on every rank after each evaluation, such as sw.EarlyStopping("loss", 3)."""
    state: Stateful | None = None
    """Additional state for checkpoints: an object with state_dict() and load_state_dict(), equal on every rank."""
    collate: Callable[[list[Any]], Any] | None = None
    """Collates a list of samples into a batch; None means torch's default_collate."""
    num_workers: int = 0
    """DataLoader worker processes per rank."""
    seed: int = 0
    masks: Masks = "drawn"
    """Dropout: "drawn" by a rank's generator, or "keyed" (counter-based) by sample and module, equal in any layout."""
    tensor_rules: Mapping[str, str] | str | None = None
    """Tensor-parallel styles by module name, such as {"blocks.*.attn.qkv": "column", ...}, or the path of a TOML file
    with them, which is read immediately, relative to the job file or else to the current directory; None uses the
    rules that are known for the model."""
    layers: str | None = None
    """Name of the module list that pipeline stages split; None finds it automatically."""
    lora: Lora | None = None
    """LoRA adapters to train with all other weights frozen; None trains all weights."""
    engine: Framework = "torch"
    """Framework of the model: "torch" for a `torch.nn.Module`, "mlx" for an `mlx.nn.Module`."""

    def __post_init__(self) -> None:
        finished = any(hasattr(self.model, name) for name in ("named_parameters", "trainable_parameters"))
        if finished and not isinstance(self.model, type):
            raise JobError(
                f"Job.model must be a function that returns the model, got a {type(self.model).__name__}",
                code="job.model-not-factory",
                fix=CALLABLES["model"],
            )
        for name in ("model", "data", "optimizer", "forward", "schedule"):
            value = getattr(self, name)
            if not callable(value) or is_torch_scheduler(value):
                fact = f"Job.{name} must be a function, got {_described(value)}"
                raise JobError(fact, code="job.not-callable", fix=CALLABLES[name])
        if not isinstance(self.loss, Loss):
            raise JobError(
                f"Job.loss must be a Loss, got {_described(self.loss)}",
                code="job.loss-not-a-loss",
                fix="pass sw.losses.cross_entropy, sw.Loss(sum=..., count=...) or, for a function that returns a mean,"
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
                f"Job.clip_norm must be a positive number, got {self.clip_norm!r}",
                code="job.clip-norm-invalid",
                fix="pass a number above 0, or None",
            )
        for name, metric in self.metrics.items():
            if name == "loss":
                raise JobError(
                    "Job.metrics must not contain 'loss', which the report always contains",
                    code="job.metric-name-reserved",
                    fix="rename the metric",
                )
            if not isinstance(metric, Metric):
                raise JobError(
                    f"Job.metrics[{name!r}] must be a Metric, got {_described(metric)}",
                    code="job.metric-not-a-metric",
                    fix="pass sw.Metric(sum=..., count=...)",
                )
        if self.state is not None and not _is_stateful(self.state):
            raise JobError(
                f"Job.state must have state_dict() and load_state_dict(), got {_described(self.state)}",
                code="job.state-without-methods",
                fix="pass an object with both methods",
            )
        if self.lora is not None and not isinstance(self.lora, Lora):
            raise JobError(
                f"Job.lora must be a Lora, got {_described(self.lora)}",
                code="job.lora-not-a-lora",
                fix='pass sw.Lora(targets=("q_proj", "v_proj"), rank=16)',
            )

    def _check_choices(self) -> None:
        if self.masks not in get_args(Masks):
            raise JobError(f"unknown Job.masks {self.masks!r}", code="job.unknown-masks", fix='use "drawn" or "keyed"')
        if self.engine not in get_args(Framework):
            names = " or ".join(f'"{name}"' for name in get_args(Framework))
            raise JobError(f"unknown Job.engine {self.engine!r}", code="job.unknown-engine", fix=f"use {names}")
        if self.weights is not None:
            local_path(self.weights)  # raises for a URL

    def _check_callbacks(self) -> None:
        if self.evaluate_every is not None:
            _check_whole("evaluate_every", self.evaluate_every, least=1)
        check_callbacks("on_step", self.on_step)
        check_callbacks("on_evaluate", self.on_evaluate)
        for callback in as_callbacks(self.on_evaluate):
            known = {"loss", *self.metrics}
            if isinstance(callback, EarlyStopping) and callback.metric not in known:
                raise JobError(
                    f"Job.on_evaluate has EarlyStopping({callback.metric!r}), but Job.metrics has no such metric",
                    code="job.early-stopping-metric",
                    fix=nearest(callback.metric, known),
                )

    def _check_length(self) -> None:
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) != 1:
            raise JobError(
                f"the job has {' and '.join(given) or 'no length'}, but must have exactly one length",
                code="job.one-length-needed",
                fix="pass one of epochs=, steps=, tokens=",
            )
        _check_whole(given[0], getattr(self, given[0]), least=1)


CALLABLES = {
    # Fields of Job that are functions -> fix for an invalid value.
    "model": "pass a function that returns the model, such as lambda: Net()",
    "data": "pass a function that returns the dataset of a split, such as sw.datasets.digits",
    "optimizer": "pass a factory such as sw.adamw(lr=1e-3), or lambda named: torch.optim.SGD(named, lr=0.1)",
    "forward": "pass a function (model, batch) -> output",
    "schedule": "pass a function (step, total) -> factor, such as sw.schedules.Cosine()",
}

_LONGEST = 80
"""Maximum number of characters of a value that an error message quotes."""


def _check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        fact = f"Job.{name} must be an integer of at least {least}, got {value!r}"
        raise JobError(fact, code="job.not-whole-number", fix=f"set {name}={least} or more")


def _described(value: object) -> str:
    """Return a short description of a value: its repr, or its class if the repr is long or contains an address."""
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
