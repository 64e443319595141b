"""The journal of a training: the start report, losses published once a second, skipped steps, memory."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from shardwise.engines.engine import engine_named
from shardwise.runs import EventLog, share_run
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.step.step import Mark, Step, StepReport


class Journal:
    """Takes every step's report and writes events of many at once; on every rank alike."""

    def __init__(self, world: World, events: EventLog, mark: Mark) -> None:
        self.samples = 0
        self.skipped = 0
        self.loss = math.nan
        """Of the last step that was published."""
        self._window = Window()
        self._world = world
        self._events = events
        self._mark = mark
        self._has_warned = False
        self._is_stopping = False

    def add(self, report: StepReport, *, publish: bool, stop: bool) -> bool:
        """Take one report; return whether any rank was asked to stop. Communicates over the world when it publishes.

        It does so when asked, and by itself about once a second, at the same step on every rank; and in every step
        from a request to stop on, since the training leaves when replicas have met.
        """
        self.samples += report.samples
        if not self._window.add(report) and not publish and not self._is_stopping:
            return False
        self._publish(report.number + 1, stop=stop)
        return self._is_stopping

    def publish_rest(self) -> None:
        """Write the steps that are not yet written, if any; communicates over the world then, on every rank."""
        if self._window.last is not None:
            self._publish(self._window.last.number + 1, stop=False)

    def _publish(self, number: int, *, stop: bool) -> None:
        self._mark("publish", number)
        published = self._window.publish(self._world, stop=stop)
        self._is_stopping |= published.pop("stop")
        self._events.write("steps", **published, memory_bytes=peak_bytes(self._world.device))
        self.skipped += published["skipped"]
        self.loss = published["losses"][-1]
        self._warn(published)
        self._mark("data", number)

    def restart_clock(self) -> None:
        """Leave the time since the last publication out: it was not spent on steps."""
        self._window.restart_clock()

    def _warn(self, published: dict[str, Any]) -> None:
        """Say once when losses stop being numbers."""
        for number, loss in enumerate(published["losses"], published["first"]):
            if not math.isfinite(loss) and not self._has_warned:
                self._events.write("note", text=f"the loss of step {number} is {loss}")
                self._has_warned = True


class Curves:
    """Writes the steps and evaluations of a loop over steps to a run directory, where `shardwise watch` shows them."""

    def __init__(self, step: Step, folder: Path | str) -> None:
        """Open the run directory, and write what starts; communicates over the world, called on every rank."""
        job, plan, world = step.source
        self._events = EventLog(share_run(Path(folder)).events(world.rank))
        self._events.write("start", **start_report(job, plan, world, step))
        self._journal = Journal(world, self._events, step.mark)
        self._last: StepReport | None = None

    def add(self, report: StepReport) -> None:
        """Take the report of a step; communicates over the world about once a second, called on every rank."""
        self._journal.add(report, publish=False, stop=False)
        self._last = report

    def evaluation(self, values: dict[str, float]) -> None:
        """Write what `evaluate` returned after the last step."""
        if self._last is not None:
            epoch = self._last.cursor.epoch
            self._events.write("evaluation", step=self._last.number + 1, epoch=epoch, values=values)
        self._journal.restart_clock()

    def close(self) -> None:
        """Write the steps that are not yet written; communicates over the world, called on every rank."""
        self._journal.publish_rest()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._events.close()  # other ranks may not come to a collective any more


# The window: steps since the last publication, so that losses cost one collective a second, not one a step.


PUBLISH_S = 1.0
_MOST_STEPS = 1000


class Window:
    """Collects step reports until it is full; all ranks agree on when that is, since `size` is."""

    def __init__(self) -> None:
        self.size = 1
        self._reports: list[StepReport] = []
        self._began = time.perf_counter()

    @property
    def last(self) -> StepReport | None:
        """The newest report that is not yet published."""
        return self._reports[-1] if self._reports else None

    def restart_clock(self) -> None:
        """Leave the time since the last publication out: it was not spent on steps."""
        self._began = time.perf_counter()

    def add(self, report: StepReport) -> bool:
        """Take a report; return whether it is time to publish."""
        self._reports.append(report)
        return len(self._reports) >= self.size

    def publish(self, world: World, *, stop: bool = False) -> dict[str, Any]:
        """Return the window's steps with global losses, and start the next; communicates over the world.

        `stop` on any rank is "stop" on every rank. Losses stay on the device until here: one wait for the device and
        one small all-reduce per window.
        """
        reports = self._reports
        sums = torch.stack([report.loss_sum for report in reports]).double().cpu()  # here the device is waited for
        now = time.perf_counter()
        counts = torch.tensor([report.denominator for report in reports], dtype=torch.float64)
        seconds = now - self._began
        summed = torch.cat([sums, counts, torch.tensor([seconds, float(stop)], dtype=torch.float64)])
        if world.size > 1:
            dist.all_reduce(summed, group=world.host_group)
        *_, all_seconds, stops = summed.tolist()
        # All ranks know one denominator, or that of their own replica: its mean over the world is the global one.
        counts = summed[len(reports) : 2 * len(reports)] / world.size
        losses = (summed[: len(reports)] / counts.where(counts > 0, 1)).tolist()
        self._reports, self._began = [], now
        # Every rank computes the same size from the same reduced time.
        self.size = min(_MOST_STEPS, max(1, round(len(reports) * PUBLISH_S / max(all_seconds / world.size, 1e-6))))
        last = reports[-1]
        norms = [report.grad_norm for report in reports if report.grad_norm is not None]
        return {
            "first": reports[0].number,
            "epoch": last.cursor.epoch,
            "losses": losses,
            "lr": last.lr,
            "samples": sum(report.samples for report in reports),
            "counted": round(float(counts.sum())),
            "grad_norm": float(norms[-1]) if norms else None,
            "skipped": int(sum(report.skipped for report in reports)),
            "seconds": seconds,
            "stop": stops > 0,
        }


# How much memory a rank has taken at most: on its GPU, or of the host where it computes there.


_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak so far: bytes of tensors on a GPU, else of resident memory; under 0.1 ms."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Not getrusage, whose peak begins with that of the process that started this one.
        with open("/proc/self/status", "rb") as status:  # noqa: PTH123 - half the time of Path.read_bytes
            line = next((line for line in status if line.startswith(b"VmHWM:")), b"")
    except OSError:
        line = b""
    if line:
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


# What is said before the first step: who runs where, the batch algebra, dtypes, rates, and each value's source.


_QUARTERS = (0.0, 0.25, 0.5, 1.0)


def start_report(job: Job, plan: Plan, world: World, step: Step) -> dict[str, Any]:
    """Return the facts of the start as plain values; communicates over the world, on every rank."""
    me = {"rank": world.rank, "host": world.host, "device": str(world.device), "pid": os.getpid()}
    length, layout = step.length, plan.layout
    num_parameters = _on_all_stages(step.num_parameters, plan, world)
    num_trained = num_parameters
    if job.lora is not None:
        mine = sum(parameter.numel() for _, parameter in step.named_parameters() if parameter.requires_grad)
        num_trained = _on_all_stages(mine, plan, world)
    last = length.num_steps - 1
    base_rate = step.base_rates[0]
    rates = {f"{share:.0%}": base_rate * job.schedule(round(share * last), length.num_steps) for share in _QUARTERS}
    batch = f"{plan.batch_size} = micro-batch {plan.micro_batch} x accumulation {plan.accumulation} x dp {layout.dp}"
    return {
        "ranks": world.gather(me),
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
            ["precision", str(plan.precision), plan.source("precision")],
            ["optimizer", _kind(step), "job"],
            ["learning rate", " · ".join(f"{rate:.2g} at {at}" for at, rate in rates.items()), _words(job.schedule)],
            ["batch norm", plan.batch_norm, plan.source("batch_norm")],
            *_adapters(job, num_trained),
            *_options(plan, num_trained),
        ],
    }


def _adapters(job: Job, num_trained: int) -> Iterator[list[str]]:
    """Yield a line about adapters, where there are some."""
    if job.lora is not None:
        lora = job.lora
        words = f"rank {lora.rank}, alpha {lora.alpha:g} beside {', '.join(lora.targets)}"
        yield ["adapters", f"{words}: {num_trained:,} parameters are trained, the others frozen", "job"]


def _options(plan: Plan, num_trained: int) -> Iterator[list[str]]:
    """Yield a line for each option that is not at its default, and the trade of gradient sync where there is one."""
    default = type(plan)()
    for name in ("engine", "recompute", "compile", "capture", "fused_loss", "sequence_parallel", "offload", "pipeline"):
        value = getattr(plan, name)
        if value != getattr(default, name) or (name == "pipeline" and plan.layout.pp > 1):
            shown = engine_named(plan.engine).describe() if name == "engine" else _shown(value)
            yield [name.replace("_", " "), shown, plan.source(name)]
    if plan.communication.sync_every > 1:
        yield ["low communication", _rounds(plan), plan.source("communication.sync_every")]
    if plan.zero >= 2 and plan.accumulation > 1:
        yield ["gradient sync", sync_trade(plan, num_trained), plan.source("gradient_sync")]


def _rounds(plan: Plan) -> str:
    """Say how replicas come together that train on their own."""
    options = plan.communication
    return (
        f"{plan.layout.replicate} replicas meet after {options.sync_every} steps, outer learning rate"
        f" {options.outer_lr:g}, momentum {options.outer_momentum:g}; changes numbers"
    )


def sync_trade(plan: Plan, num_trained: int) -> str:
    """Say what `gradient_sync` costs on one rank of a sharded plan: memory held against bytes sent, in GB."""
    whole = num_trained * ELEMENT_BYTES[plan.precision.reduce] / (plan.layout.pp * plan.layout.tp) / 1e9
    shards = plan.layout.folded.shard
    cut = whole / shards
    sent = whole * (shards - 1) / shards
    kept = {"last": whole, "every": cut}
    send = {"last": sent, "every": sent * plan.accumulation}
    mine, other = plan.gradient_sync, "every" if plan.gradient_sync == "last" else "last"
    return (
        f"{mine}: holds {kept[mine]:.2g} GB of gradients, sends {send[mine]:.2g} GB a step"
        f" ({other}: {kept[other]:.2g} GB, {send[other]:.2g} GB)"
    )


def _shown(value: object) -> str:
    """A section as its fields, anything else as itself."""
    if not dataclasses.is_dataclass(value):
        return str(value)
    return ", ".join(f"{field.name} {getattr(value, field.name)}" for field in dataclasses.fields(value))


def _on_all_stages(mine: int, plan: Plan, world: World) -> int:
    """Return a count of parameters of the whole model, given this rank's; communicates over the world."""
    if plan.layout.pp == 1:
        return mine
    return round(world.sum({"parameters": mine})["parameters"] * plan.layout.pp / world.size)


def _kind(step: Step) -> str:
    """An optimizer's class, and which of torch's kinds of it was chosen."""
    defaults: dict[str, object] = getattr(step.optimizer, "defaults", {})
    chosen = [kind for kind in ("fused", "foreach") if defaults.get(kind)]
    return ", ".join([step.optimized.kind, *chosen])


def _words(schedule: object) -> str:
    """A schedule's own repr when it has one, else its name."""
    return getattr(schedule, "__name__", repr(schedule))
