"""Changes of the question that would help: another batch size, other numbers of devices, options of the chosen plan.

The idea: each hint is a search of its own, for a nearby batch size or cluster size, whose best plan is compared with
the chosen one. Searches of smaller clusters end where halving the devices doubles the time, as it does as long as
compute dominates.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.hardware.cluster import read_catalogue
from shardwise.planner.search.choices import divisors
from shardwise.planner.search.search import choose, refused_by_rule, search
from shardwise.planner.search.sizes import cluster_sizes, doubled, plans_of_sizes, resized
from shardwise.plans.pipeline import SCHEDULES
from shardwise.plans.rules import is_exact_in_graph
from shardwise.units import format_rate, format_seconds

if TYPE_CHECKING:
    from shardwise.hardware.machine import Cluster
    from shardwise.planner.search.question import Question
    from shardwise.planner.search.search import Answer, Candidate

LARGEST = 65_536
"""Devices of the largest cluster that `smallest_cluster` tries."""
NEAR = 0.25
"""Largest relative change of a batch size that a hint proposes."""
LEAST_GAIN = 0.05
"""Gain in throughput below which a hint is not worth a change."""
NEARLY = 1.1
"""Step time of fewer devices, relative to all of them, that counts as nearly the same."""
PER_DEVICE = 0.9
"""Fraction of the best throughput per device that a hint keeps."""
WASTED = 0.5
"""Fraction of the best throughput per device below which fewer devices are proposed."""
MOST_COMPUTE = 0.6
"""Share of compute in a step above which halving the devices costs too much time to be considered."""
MANY, MOST_COMPUTE_OF_MANY = 1024, 0.5
"""Number of devices above which such a search takes most of a second, and the share of compute there."""
SCALES = 1.8
"""Ratio of step times from which halving the devices gains little: each of them would do hardly more."""
COMPUTE = ("matmul", "attention", "memory", "recompute")
"""Parts of a step that take twice as long on half of the devices."""


@dataclass(frozen=True, kw_only=True)
class Hint:
    """A change of the question, with the prediction of its best plan."""

    text: str
    batch_size: int
    num_devices: int
    step_s: float
    throughput_ratio: float
    """Samples per second and device, relative to the chosen plan."""


def hints(answer: Answer) -> list[Hint]:
    """Return the hints for a question whose batch does not divide, or whose cluster is too large for the model."""
    is_corrected, answer = answer.uncorrected is not None, answer.uncorrected or answer
    if answer.best is None:
        return []
    found = uneven_batch(answer, answer.best)
    # Ranks on a CPU share its cores, so that fewer of them are not smaller.
    if answer.question.cluster.device.kind != "cpu":
        found = [*found, *fewer_devices(answer, answer.best)]
    if not is_corrected:
        return found
    # Own runs are of this number of devices; a hint compares predictions with each other, and says so.
    return [dataclasses.replace(hint, text=f"{hint.text} (times without the correction by own runs)") for hint in found]


def rate_text(candidate: Candidate, num_devices: int | None = None) -> str:
    """Return the throughput per device with its unit: "9,662 tokens/s each"; devices beyond those of the plan idle."""
    time, used = candidate.time, candidate.plan.layout.world_size
    share = used / (num_devices or used)
    if time.tokens_per_second_per_device is not None:
        return f"{format_rate(share * time.tokens_per_second_per_device)} tokens/s each"
    return f"{format_rate(share * _per_device(candidate))} samples/s each"


def _per_device(candidate: Candidate) -> float:
    return candidate.time.samples_per_second / candidate.plan.layout.world_size


def uneven_batch(answer: Answer, best: Candidate) -> list[Hint]:
    """Return the nearest batch sizes and numbers of devices that divide evenly, if they are clearly faster."""
    devices, batch = answer.question.cluster.num_devices + answer.num_idle, answer.question.batch_size
    if batch % devices == 0:
        return []
    question = resized(answer.question, devices)
    found = []
    for size in _near_batches(batch, devices):
        other = best_plan(dataclasses.replace(question, batch_size=size))
        used = other.plan.layout.world_size if other is not None else devices
        text = f"a batch of {size:,} samples, which {used:,} devices divide evenly,"
        found += _faster(text, other, best, num_devices=devices, num_paid=devices)
    for size in _near_sizes(question.cluster, batch):
        if size <= best.plan.layout.world_size and answer.num_idle:
            continue  # the plan leaves the others idle anyway, and is faster on more of them
        wider = resized(question, size)
        text = f"--cluster {cluster_option(wider.cluster)}, whose devices divide a batch of {batch:,} evenly,"
        found += _faster(text, search(wider, quick=True).best, best, num_devices=size, num_paid=devices)
    split = answer.faster_split
    if split is not None:
        times = f"{format_seconds(split.time.seconds)} a step, instead of {format_seconds(best.time.seconds)}"
        text = f"for a batch of {batch:,}, splitting the model by {split.plan.layout} would take {times}"
        found.append(_hint(text, split, split.time.samples_per_second / best.time.samples_per_second))
    return found


def _near_batches(batch: int, devices: int) -> list[int]:
    """Return the nearest batch sizes, within NEAR, that all devices divide; else half of them, a quarter and so on."""
    while devices > 1:
        down = batch // devices * devices
        near = [size for size in (down, down + devices) if size and abs(size - batch) <= NEAR * batch]
        if near:
            return [size for size in near if size != batch]
        devices //= 2
    return []


def best_plan(question: Question) -> Candidate | None:
    """Return the best plan, on fewer devices if the batch does not divide over all; None if none fits."""
    if question.batch_size % question.cluster.num_devices == 0:
        return search(question, quick=True).best
    return choose(plans_of_sizes(question), question.widest)


def _near_sizes(cluster: Cluster, batch: int) -> list[int]:
    """Return the next smaller and the next larger number of devices that divides the batch, up to a factor of 2."""
    devices = cluster.num_devices
    sizes = [size for size in cluster_sizes(cluster.node, 2 * devices) if batch % size == 0 and 2 * size >= devices]
    below, above = [size for size in sizes if size < devices], [size for size in sizes if size > devices]
    return [*below[-1:], *above[:1]]


def _faster(text: str, other: Candidate | None, best: Candidate, *, num_devices: int, num_paid: int) -> list[Hint]:
    """Return a hint if a plan on `num_devices` trains clearly more per device than the best one on `num_paid`."""
    if other is None:
        return []
    ratio = other.time.samples_per_second / num_devices / (best.time.samples_per_second / num_paid)
    if ratio < 1 + LEAST_GAIN:
        return []
    before = rate_text(best, num_paid)
    idle = num_paid - best.plan.layout.world_size
    if idle:
        before += f", since {idle:,} of {num_paid:,} devices {'stays' if idle == 1 else 'stay'} idle"
    text = f"{text} gives {rate_text(other, num_devices)} with {other.family}, instead of {before} (+{ratio - 1:.0%})"
    return [_hint(text, other, ratio)]


def _hint(text: str, candidate: Candidate, ratio: float) -> Hint:
    plan = candidate.plan
    return Hint(
        text=text,
        batch_size=plan.batch_size,
        num_devices=plan.layout.world_size,
        step_s=candidate.time.seconds,
        throughput_ratio=ratio,
    )


def fewer_devices(answer: Answer, best: Candidate) -> list[Hint]:
    """Return how few devices take nearly the same time, or keep most of the throughput per device."""
    cluster, seconds = answer.question.cluster, best.time.seconds
    busy = sum(best.time.parts.get(name, 0.0) for name in COMPUTE)
    most_busy = MOST_COMPUTE if cluster.num_devices <= MANY else MOST_COMPUTE_OF_MANY
    if cluster.num_devices == 1 or busy > most_busy * seconds:
        return []
    smaller = _halved(answer.question, best)
    found = []
    nearly = [candidate for candidate in smaller if candidate.time.seconds <= NEARLY * seconds]
    if nearly:
        few = min(nearly, key=lambda candidate: candidate.plan.layout.world_size)
        times = f"{format_seconds(few.time.seconds)} a step, all {cluster.num_devices:,} take {format_seconds(seconds)}"
        found.append(_fewer(answer, few, best, f"takes {times}"))
    most = max((_per_device(candidate) for candidate in (*smaller, best)), default=0.0)
    kept = [candidate for candidate in smaller if _per_device(candidate) >= PER_DEVICE * most]
    if kept and _per_device(best) < WASTED * most:
        large = max(kept, key=lambda candidate: candidate.plan.layout.world_size)
        if large not in nearly:
            rates = f"{rate_text(large)}, all {cluster.num_devices:,} give {rate_text(best)}"
            found.append(_fewer(answer, large, best, f"gives {rates}"))
    return found


def _halved(question: Question, best: Candidate) -> list[Candidate]:
    """Return the best plans on about half of the devices, a quarter and so on, until the time grows as much."""
    found, node = [best], question.cluster.node
    while (size := found[-1].plan.layout.world_size) > 1:
        smaller = cluster_sizes(node, size // 2)[-1]
        candidate = search(resized(question, smaller), quick=True).best
        if candidate is None:
            break
        found.append(candidate)
        if candidate.time.seconds > SCALES / 2 * size / smaller * found[-2].time.seconds:
            break
    return found[1:]


def _fewer(answer: Answer, few: Candidate, best: Candidate, what: str) -> Hint:
    size = few.plan.layout.world_size
    option = cluster_option(resized(answer.question, size).cluster)
    text = f"fewer devices would do: --cluster {option} {what}"
    return _hint(text, few, _per_device(few) / _per_device(best))


# Names of clusters, and the smallest that fits.


def cluster_option(cluster: Cluster) -> str:
    """Return the value of --cluster for a cluster: 8xH100, 2xp4d.24xlarge or 2xthis."""
    node, device = cluster.node, cluster.device
    if node.name == "this machine":
        return f"{cluster.num_devices}xthis"
    known = read_catalogue().nodes.get(node.name)
    is_known = known is not None and known.num_devices == node.num_devices
    if is_known and node.name != device.node and cluster.num_devices >= node.num_devices:
        return f"{cluster.num_nodes}x{node.name}"
    if is_known or cluster.num_nodes == 1:
        return f"{cluster.num_devices}x{device.name}"
    return f"{cluster.num_nodes}x{cluster.devices_per_node}x{device.name}"


def changes_that_fit(question: Question, *, batch_is_fixed: bool) -> list[str]:
    """Return the options of the smallest changes after which a plan fits: another batch size, a larger cluster."""
    found = []
    others = ((size, best_plan(dataclasses.replace(question, batch_size=size))) for size in _other_batches(question))
    fitting = [(size, other.family) for size, other in others if other is not None]
    if fitting:
        size, family = next((each for each in fitting if each[1] != "offload"), fitting[0])
        found.append(f"--batch-size {size}, with which {family} fits")
    wider = smallest_cluster(question, question.batch_size if batch_is_fixed else None)
    if wider is not None:
        found.append(f"--cluster {cluster_option(wider[0])}, where {wider[1]} fits")
    elif not found and batch_is_fixed:  # such as a batch of 1, which several devices do not divide
        wider = smallest_cluster(question)
        if wider is not None:
            batch = _grown(question.batch_size, wider[0].num_devices)
            found.append(f"--cluster {cluster_option(wider[0])} --batch-size {batch}, where {wider[1]} fits")
    return found


def _other_batches(question: Question) -> list[int]:
    """Return the nearest batch sizes that all devices divide, half of them and so on: those within NEAR first."""
    batch, devices = question.batch_size, question.cluster.num_devices
    near, far = list[int](), list[int]()
    while devices > 1 and batch % question.cluster.num_devices:
        for size in (batch // devices * devices, _grown(batch, devices)):
            if size not in (0, batch, *near, *far):
                (near if abs(size - batch) <= NEAR * batch else far).append(size)
        devices //= 2
    return near + sorted(far, key=lambda size: abs(size - batch))


def _grown(batch: int, devices: int) -> int:
    return -(-batch // devices) * devices


def smallest_cluster(question: Question, batch_size: int | None = None) -> tuple[Cluster, str] | None:
    """Return the smallest cluster of up to LARGEST such devices on which the model fits, with the family, or None.

    With `batch_size` None, the batch grows with the devices.
    """
    node = question.cluster.node
    nodes = (count * node.num_devices for count in doubled(LARGEST // node.num_devices))
    for size in sorted({*divisors(node.num_devices), *nodes}):
        if size > question.cluster.num_devices:
            batch = batch_size or _grown(question.batch_size, size)
            wider = dataclasses.replace(resized(question, size), batch_size=batch)
            best = best_plan(wider)
            if best is not None:
                return wider.cluster, best.family
    return None


# Gains of options that the search does not change, for the chosen plan.


ROUND = 25
"""Steps between synchronizations for which `rounds_gain` predicts the saving."""


def compile_gain(answer: Answer) -> float:
    """Return the fraction of the best plan's step that compiling blocks would save; 0 if not applicable."""
    answer = answer.uncorrected or answer
    best = answer.best
    if best is None or best.plan.compile != "none" or SCHEDULES[best.plan.pipeline.schedule].splits_backward:
        return 0.0
    return _gain(answer, compile="blocks")


def capture_gain(answer: Answer) -> float:
    """Return the fraction of a step that CUDA graph capture would save, with equal shapes; 0 if not applicable."""
    answer = answer.uncorrected or answer
    best = answer.best
    if best is None or best.plan.layout.world_size > 1 or answer.question.cluster.device.kind == "cpu":
        return 0.0
    if not is_exact_in_graph(best.plan):
        return 0.0
    return _gain(answer, capture="step")


def rounds_gain(answer: Answer) -> float:
    """Return the fraction of a step that synchronizing replicas every ROUND steps would save; 0 if not applicable.

    This changes the results of the training.
    """
    answer = answer.uncorrected or answer
    best = answer.best
    if best is None or best.plan.layout.replicate == 1:
        return 0.0
    if answer.question.model.plain.ties_samples and best.plan.batch_norm == "sync":
        return 0.0
    return _gain(answer, communication=dataclasses.replace(best.plan.communication, sync_every=ROUND))


def _gain(answer: Answer, **changes: Any) -> float:
    question, best = answer.question, answer.best
    if best is None:
        return 0.0
    plan = dataclasses.replace(best.plan, **changes)
    if refused_by_rule(question, plan):
        return 0.0
    if question.memory_of(plan).total > question.capacity:
        return 0.0
    return 1 - question.time_model().predict(question.model.for_plan(plan), plan).seconds / best.time.seconds
