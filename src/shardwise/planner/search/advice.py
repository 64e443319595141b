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
from shardwise.hardware.machine import Cluster
from shardwise.planner.search.choices import divisors
from shardwise.planner.search.search import FAMILY_TIE, anything_fits, choose, refused_by_rule, search
from shardwise.plans.pipeline import SCHEDULES
from shardwise.plans.rules import is_exact_in_graph
from shardwise.units import format_rate, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.hardware.machine import NodeType
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
MOST_UTILIZATION = 0.7
"""Model FLOPs utilization that no published run exceeds; it bounds what fewer devices can reach."""
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
    for size in (batch // devices * devices, -(-batch // devices) * devices):
        if size and abs(size - batch) <= NEAR * batch:
            other = search(dataclasses.replace(question, batch_size=size)).best
            text = f"a batch of {size:,} samples, which {devices:,} devices divide evenly,"
            found += _faster(text, other, best, num_paid=devices)
    for size in _near_sizes(question.cluster, batch):
        if size <= best.plan.layout.world_size and answer.num_idle:
            continue  # the plan leaves the others idle anyway, and is faster on more of them
        wider = resized(question, size)
        text = f"--cluster {cluster_option(wider.cluster)}, whose devices divide a batch of {batch:,} evenly,"
        found += _faster(text, search(wider).best, best, num_paid=devices)
    return found


def _near_sizes(cluster: Cluster, batch: int) -> list[int]:
    """Return the next smaller and the next larger number of devices that divides the batch, up to a factor of 2."""
    devices = cluster.num_devices
    sizes = [size for size in cluster_sizes(cluster.node, 2 * devices) if batch % size == 0 and 2 * size >= devices]
    below, above = [size for size in sizes if size < devices], [size for size in sizes if size > devices]
    return [*below[-1:], *above[:1]]


def _faster(text: str, other: Candidate | None, best: Candidate, *, num_paid: int) -> list[Hint]:
    """Return a hint if a plan trains clearly more per device than the best one on `num_paid` devices, some idle."""
    if other is None:
        return []
    ratio = _per_device(other) / (best.time.samples_per_second / num_paid)
    if ratio < 1 + LEAST_GAIN:
        return []
    before = rate_text(best, num_paid)
    idle = num_paid - best.plan.layout.world_size
    if idle:
        before += f", since {idle:,} of {num_paid:,} devices {'stays' if idle == 1 else 'stay'} idle"
    text = f"{text} gives {rate_text(other)} with {other.family}, instead of {before} (+{ratio - 1:.0%})"
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
        candidate = search(resized(question, smaller)).best
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


# Numbers of devices: fewer if the batch divides over these only, the best up to a limit, the smallest that fits.


def leave_idle(answer: Answer) -> Answer:
    """Return the answer for fewer devices if the batch divides over these only and the result is better, or `answer`.

    Better is faster, or equal within model error without a split of the model; `Answer.num_idle` counts the others.
    """
    question = answer.question
    size = question.cluster.num_devices
    if question.batch_size % size == 0:
        return answer
    found = answer
    for fewer in _sizes_that_divide(question):
        best = found.best
        if best is not None and fewer * MOST_UTILIZATION < best.plan.layout.world_size * best.time.mfu:
            continue
        part = search(resized(question, fewer))
        if part.best is not None and (best is None or choose([best, part.best]) is part.best):
            found = dataclasses.replace(part, num_idle=size - fewer)
    return found


def _sizes_that_divide(question: Question) -> list[int]:
    """Return the largest numbers of devices below the cluster's over which tp, and without tp, the batch divides."""
    node, limit = question.cluster.node.num_devices, question.cluster.num_devices
    numbers = divisors(question.batch_size)
    degrees = [tp for tp in question.model.plain.tp_degrees if node % tp == 0]
    shared = {samples * tp for samples in numbers for tp in degrees}

    def largest(sizes: Iterable[int]) -> int:
        return max(size for size in sizes if size < limit and (size <= node or size % node == 0))

    return list(dict.fromkeys((largest(shared), largest(numbers))))


def best_size(question: Question, limit: int) -> tuple[Answer, list[Answer]]:
    """Return the result for the best number of devices up to `limit`, and the results of all numbers with a plan.

    The best is the smallest number whose step takes at most FAMILY_TIE longer than the shortest; without any plan, the
    limit itself.
    """
    node = question.cluster.node
    sizes = {*range(1, min(limit, node.num_devices) + 1), *cluster_sizes(node, limit)}
    answers = [search(resized(question, size)) for size in sorted(sizes)]
    fitting = [answer for answer in answers if answer.best is not None]
    if not fitting:
        return answers[-1], []
    least = min(_seconds(answer) for answer in fitting)
    return next(answer for answer in fitting if _seconds(answer) <= least * (1 + FAMILY_TIE)), fitting


def _seconds(answer: Answer) -> float:
    return answer.best.time.seconds if answer.best is not None else float("inf")


def cluster_sizes(node: NodeType, limit: int) -> list[int]:
    """Return numbers of devices up to `limit` in ascending order: divisors of a node, then whole nodes.

    Up to 16 nodes, all numbers; above, two for each power of two, and the largest.
    """
    inside = [size for size in divisors(node.num_devices) if size <= limit]
    most = limit // node.num_devices
    nodes = {*range(2, min(most, 16) + 1), *(_doubled(most))}
    if most > 1:
        nodes.add(most)
    return inside + [count * node.num_devices for count in sorted(nodes)]


def _doubled(most: int) -> list[int]:
    """Return 2, 3, 4, 6, 8, 12 and so on up to `most`."""
    found = []
    for power in range(20):
        found += [factor << power for factor in (2, 3) if factor << power <= most]
    return found


def resized(question: Question, num_devices: int) -> Question:
    """Return the question for another number of the same devices, with the same batch."""
    cluster = Cluster(node=question.cluster.node, num_devices=num_devices)
    return dataclasses.replace(question, cluster=cluster)


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


def smallest_cluster(question: Question, batch_size: int | None = None) -> tuple[Cluster, str] | None:
    """Return the smallest cluster of up to LARGEST such devices on which the model fits, with the family, or None.

    With `batch_size` None, the batch grows with the devices.
    """
    node = question.cluster.node
    sizes = [
        *divisors(node.num_devices),
        *(count * node.num_devices for count in _doubled(LARGEST // node.num_devices)),
    ]
    for size in sorted(sizes):
        if size <= question.cluster.num_devices:
            continue
        batch = batch_size or -(-question.batch_size // size) * size
        wider = dataclasses.replace(resized(question, size), batch_size=batch)
        family = anything_fits(wider)
        if family is not None:
            return wider.cluster, family
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
