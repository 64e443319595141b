"""Writes the events of a training: the start report, losses once per second, skipped steps and peak memory."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch
import torch.distributed as dist

from shardwise.engines.engine import engine_named
from shardwise.errors import TrainingError
from shardwise.parallel.sharded import DTYPES
from shardwise.runs import EventLog, share_run
from shardwise.runs.data_wait import DataWaits
from shardwise.training.comparison import median_step
from shardwise.training.spec import TrainResult
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.step.step import Step, StepReport


class Journal:
    """Collects step reports and writes them as events in batches; used identically on every rank."""

    def __init__(self, world: World, events: EventLog, step: Step) -> None:
        self.samples = 0
        self.skipped = 0
        self.loss = math.nan
        """Loss of the last published step."""
        self._window = Window()
        self._world = world
        self._events = events
        self._mark = step.mark
        self._data_waits = DataWaits(step.feed, step.source[0].num_workers)
        self._measured: deque[tuple[int, float]] = deque(maxlen=_MOST_WINDOWS)
        """Steps and seconds of the newest windows without the first, which includes compilation and allocations."""
        self._is_first = True
        self._has_warned = False
        self._is_stopping = False

    def add(self, report: StepReport, *, publish: bool, stop: bool) -> bool:
        """Add one report; return whether any rank received a stop signal. Communicates over the world to publish.

        Reports are published if `publish` is set, about once per second (at the same step on every rank), and in every
        step after a stop signal, because the training exits at the next synchronization of the replicas.
        """
        self.samples += report.samples
        if not self._window.add(report) and not publish and not self._is_stopping:
            return False
        self._publish(report.number + 1, stop=stop)
        return self._is_stopping

    def publish_rest(self) -> None:
        """Publish the remaining reports, if any. Communicates over the world; call on every rank."""
        if self._window.last is not None:
            self._publish(self._window.last.number + 1, stop=False)

    def _publish(self, number: int, *, stop: bool) -> None:
        self._mark("publish", number)
        published = self._window.publish(self._world, stop=stop)
        self._is_stopping |= published.pop("stop")
        wait = self._data_waits.next(len(published["losses"]), published["seconds"])
        self._events.write("steps", **published, data_s=wait.waited_s, memory_bytes=peak_bytes(self._world.device))
        if not self._is_first:
            self._measured.append((wait.steps, wait.seconds))
            self._data_waits.note(wait, self._events)
        self._is_first = False
        self.skipped += published["skipped"]
        self.loss = published["losses"][-1]
        self._warn(published)
        self._mark("data", number)

    def restart_clock(self) -> None:
        """Exclude the time since the last publication from the step time."""
        self._window.restart_clock()

    def close(self, step: Step, first_step: int, evaluation: dict[str, float], training_s: float) -> TrainResult:
        """Write and return the result of a run that began at `first_step`; raise if every step was skipped."""
        if self.skipped == step.number - first_step > 0:
            raise TrainingError(
                f"all {self.skipped} steps were skipped because no gradient was finite",
                code="train.no-finite-gradient",
                fix="lower the learning rate, set clip_norm, or check the data and the loss for NaN",
            )
        result = TrainResult(
            steps=step.number,
            first_step=first_step,
            samples=self.samples,
            skipped=self.skipped,
            loss=self.loss,
            evaluation=evaluation,
            training_s=training_s,
            samples_per_s=self.samples / training_s,
            is_stopped=step.number < step.length.num_steps,
            step_s=median_step(self._measured),
            peak_bytes=peak_bytes(self._world.device),
        )
        self._events.write("end", **msgspec.to_builtins(result))
        return result

    def _warn(self, published: dict[str, Any]) -> None:
        """Write a note for the first loss that is not finite."""
        for number, loss in enumerate(published["losses"], published["first"] + 1):
            if not math.isfinite(loss) and not self._has_warned:
                self._events.write("note", text=f"the loss of step {number} is {loss}")
                self._has_warned = True


class Curves:
    """Writes the steps and evaluations of a custom loop to a run directory, which `shardwise watch` displays."""

    def __init__(self, step: Step, folder: Path | str) -> None:
        """Open the run directory and write the start report. Communicates over the world; call on every rank."""
        job, plan, world = step.source
        self._events = EventLog(share_run(Path(folder)).events(world.rank))
        self._events.write("start", **start_report(job, plan, world, step))
        self._journal = Journal(world, self._events, step)
        self._last: StepReport | None = None

    def add(self, report: StepReport) -> None:
        """Add the report of a step. Communicates over the world about once per second; call on every rank."""
        self._journal.add(report, publish=False, stop=False)
        self._last = report

    def evaluation(self, values: dict[str, float]) -> None:
        """Write a result of `evaluate`, as evaluated after the last step that was added."""
        if self._last is not None:
            epoch = self._last.cursor.epoch
            self._events.write("evaluation", step=self._last.number + 1, epoch=epoch, values=values)
        self._journal.restart_clock()

    def close(self) -> None:
        """Publish the remaining reports and close the log. Communicates over the world; call on every rank."""
        self._journal.publish_rest()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._events.close()  # after an error, other ranks may not join a collective


# The window: steps since the last publication, so that losses cost one collective per second instead of one per step.


PUBLISH_S = 1.0
_MOST_WINDOWS = 1000
"""Windows from which the median step time is computed."""
_MOST_STEPS = 1000


class Window:
    """Collects step reports until it is full; `size` is equal on all ranks, so all publish at the same step."""

    def __init__(self) -> None:
        self.size = 1
        self._reports: list[StepReport] = []
        self._began = time.perf_counter()

    @property
    def last(self) -> StepReport | None:
        """The newest unpublished report."""
        return self._reports[-1] if self._reports else None

    def restart_clock(self) -> None:
        """Exclude the time since the last publication from the step time."""
        self._began = time.perf_counter()

    def add(self, report: StepReport) -> bool:
        """Add a report; return whether the window is full."""
        self._reports.append(report)
        return len(self._reports) >= self.size

    def publish(self, world: World, *, stop: bool = False) -> dict[str, Any]:
        """Return the steps of the window with global losses and start a new window. Communicates over the world.

        `stop` on any rank sets "stop" on every rank. Losses stay on the device until this call, which costs one
        device synchronization and one small all-reduce per window.
        """
        reports = self._reports
        sums = torch.stack([report.loss_sum for report in reports]).double().cpu()  # synchronizes with the device
        now = time.perf_counter()
        counts = torch.tensor([report.denominator for report in reports], dtype=torch.float64)
        seconds = now - self._began
        summed = torch.cat([sums, counts, torch.tensor([seconds, float(stop)], dtype=torch.float64)])
        if world.size > 1:
            dist.all_reduce(summed, group=world.host_group)
        *_, all_seconds, stops = summed.tolist()
        # The mean over the world is the global loss normalizer, also if the normalizer differs between replicas.
        counts = summed[len(reports) : 2 * len(reports)] / world.size
        losses = (summed[: len(reports)] / counts.where(counts > 0, 1)).tolist()
        self._reports, self._began = [], now
        # The reduced time is equal on every rank, and so is the size computed from it.
        self.size = min(_MOST_STEPS, max(1, round(len(reports) * PUBLISH_S / max(all_seconds / world.size, 1e-6))))
        last = reports[-1]
        grad_norm = None
        for report in reports:
            if report.grad_norm is not None:
                grad_norm = report.grad_norm
        return {
            "first": reports[0].number,
            "epoch": last.cursor.epoch,
            "losses": losses,
            "lr": last.lr,
            "samples": sum(report.samples for report in reports),
            "counted": round(float(counts.sum())),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "skipped": int(sum(report.skipped for report in reports)),
            "seconds": seconds,
            "stop": stops > 0,
        }


# The peak memory of a rank: allocated memory of its GPU, or resident memory of a CPU process.


_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated on its GPU, or resident on a CPU; takes < 0.1 ms."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Not getrusage, whose peak includes that of the parent process before the fork.
        with open("/proc/self/status", "rb") as status:  # noqa: PTH123 - half the time of Path.read_bytes
            line = next((line for line in status if line.startswith(b"VmHWM:")), b"")
    except OSError:
        line = b""
    if line:
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


# The start report: ranks and hosts, batch size, precision, learning rates, and the source of each value.


_QUARTERS = (0.0, 0.25, 0.5, 1.0)


def start_report(job: Job, plan: Plan, world: World, step: Step) -> dict[str, Any]:
    """Return the start report of a training as plain values. Communicates over the world; call on every rank."""
    process = {"rank": world.rank, "host": world.host, "device": str(world.device), "pid": os.getpid()}
    length, layout = step.length, plan.layout
    num_parameters = _on_all_stages(step.num_parameters, plan, world)
    num_trained = num_parameters
    if job.lora is not None:
        num_local = sum(parameter.numel() for _, parameter in step.named_parameters() if parameter.requires_grad)
        num_trained = _on_all_stages(num_local, plan, world)
    last = length.num_steps - 1
    base_rate = step.base_rates[0]
    rates = []
    for share in _QUARTERS:
        rate = base_rate * job.schedule(round(share * last), length.num_steps)
        rates.append(f"{rate:.2g} at {share:.0%}")
    batch = f"{plan.batch_size} = micro-batch {plan.micro_batch} x accumulation {plan.accumulation} x dp {layout.dp}"
    return {
        "ranks": world.gather(process),
        "parameters": num_parameters,
        "num_steps": length.num_steps,
        "facts": [
            [
                "world",
                f"{world.size} x {world.backend}, collectives time out after {world.timeout_s:g} s",
                world.source,
            ],
            ["plan", f"{layout} (zero {plan.zero})", plan.source("layout")],
            ["batch", batch, plan.source("micro_batch")],
            ["length", f"{length.num_steps} steps", length.source],
            ["weights", step.origin, "job" if job.weights is not None else "model"],
            ["precision", _precision(job, plan, world, step), plan.source("precision")],
            ["optimizer", _kind(step), "job"],
            ["learning rate", " · ".join(rates), _schedule_name(job.schedule)],
            *_batch_norm(plan, world, step),
            *_adapters(job, num_trained),
            *_options(plan, num_trained),
        ],
    }


def _precision(job: Job, plan: Plan, world: World, step: Step) -> str:
    """Describe the plan's precision, or the model's dtypes if they differ from it. Communicates over the world."""
    dtypes: set[torch.dtype] = set()
    if engine_named(plan.engine).uses_fsdp:  # other engines convert the model
        for _, parameter in step.named_parameters():
            if parameter.is_floating_point() and (parameter.requires_grad or job.lora is None):
                dtypes.add(parameter.dtype)
    found = set().union(*world.gather(dtypes))
    if found <= {DTYPES[plan.precision.parameter]}:
        return str(plan.precision)
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
    return f"parameters {names} as Job.model builds them, not {plan.precision.parameter} as in the plan"


def _batch_norm(plan: Plan, world: World, step: Step) -> list[list[str]]:
    """Return the start report's line about batch norms if the model has any. Communicates over the world."""
    has_any = any(world.gather(engine_named(plan.engine).has_batch_norm(step.model)))
    return [["batch norm", plan.batch_norm, plan.source("batch_norm")]] if has_any else []


def _adapters(job: Job, num_trained: int) -> Iterator[list[str]]:
    """Yield the start report's line about LoRA adapters, if the job has adapters."""
    if job.lora is not None:
        lora = job.lora
        options = f"rank {lora.rank}, alpha {lora.alpha:g} on {', '.join(lora.targets)}"
        yield ["adapters", f"{options}: {num_trained:,} trainable parameters, all other parameters frozen", "job"]


_OPTIONS = (
    *("engine", "recompute", "recompute_blocks", "compile", "capture"),
    *("fused_loss", "sequence_parallel", "offload", "pipeline"),
)


def _options(plan: Plan, num_trained: int) -> Iterator[list[str]]:
    """Yield a line for each plan option that is not at its default, and for the cost of `gradient_sync`."""
    default = type(plan)()
    for name in _OPTIONS:
        value = getattr(plan, name)
        is_explained = (name == "pipeline" and plan.layout.pp > 1) or (name == "compile" and name in plan.sources)
        if value != getattr(default, name) or is_explained:
            text = _as_text(value)
            if name == "engine":
                text = engine_named(plan.engine).describe()
            yield [name.replace("_", " "), text, plan.source(name)]
    if plan.communication.sync_every > 1:
        yield ["low communication", _rounds(plan), plan.source("communication.sync_every")]
    if plan.zero >= 2 and plan.accumulation > 1:
        yield ["gradient sync", sync_trade(plan, num_trained), plan.source("gradient_sync")]


def _rounds(plan: Plan) -> str:
    """Describe the periodic synchronization of replicas."""
    options = plan.communication
    return (
        f"{plan.layout.replicate} replicas synchronize every {options.sync_every} steps, outer learning rate"
        f" {options.outer_lr:g}, momentum {options.outer_momentum:g}; changes the training result"
    )


def sync_trade(plan: Plan, num_trained: int) -> str:
    """Describe the cost of `gradient_sync` on one rank of a sharded plan: gradient memory and traffic, in GB."""
    whole = num_trained * ELEMENT_BYTES[plan.precision.reduce] / (plan.layout.pp * plan.layout.tp) / 1e9
    shards = plan.layout.folded.shard
    sent = whole * (shards - 1) / shards
    memory = {"last": whole, "every": whole / shards}
    traffic = {"last": sent, "every": sent * plan.accumulation}
    chosen = plan.gradient_sync
    other = "every" if chosen == "last" else "last"
    return (
        f"{chosen}: stores {memory[chosen]:.2g} GB of gradients, sends {traffic[chosen]:.2g} GB per step"
        f" ({other}: {memory[other]:.2g} GB, {traffic[other]:.2g} GB)"
    )


def _as_text(value: object) -> str:
    """Return a section of the plan as its fields and values, and any other value as str."""
    if not dataclasses.is_dataclass(value):
        return str(value)
    return ", ".join(f"{field.name} {getattr(value, field.name)}" for field in dataclasses.fields(value))


def _on_all_stages(num_local: int, plan: Plan, world: World) -> int:
    """Return the sum of `num_local` parameters over all pipeline stages. Communicates over the world."""
    if plan.layout.pp == 1:
        return num_local
    return round(world.sum({"parameters": num_local})["parameters"] * plan.layout.pp / world.size)


def _kind(step: Step) -> str:
    """Return the class of the optimizer and its implementation if it is not torch's default."""
    defaults: dict[str, object] = getattr(step.optimizer, "defaults", {})
    chosen = [kind for kind in ("fused", "foreach", "compiled") if defaults.get(kind)]
    return ", ".join([step.optimized.kind, *chosen])


def _schedule_name(schedule: object) -> str:
    """Return the name of a schedule function, or the repr of a schedule object."""
    return getattr(schedule, "__name__", repr(schedule))
