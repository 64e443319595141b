"""Questions near the one that was asked: fewer devices, and batch sizes that divide evenly.

A batch that the devices do not divide forces a split of the model, which is seldom the best use of the cluster. This
file searches the neighbours of a question and compares their samples per second with those of its answer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.planner.search.choices import divisors
from shardwise.planner.search.search import choose, search

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.hardware.machine import Cluster
    from shardwise.planner.search.search import Answer, Candidate, Question

LEAST_GAIN = 0.02
"""Gain in samples per second below which another batch size is not worth a change of the training."""
MOST_GROWTH = 2
"""Largest ratio of a proposed batch size to the requested one."""
MOST_LOSS = 0.1
"""Largest loss in samples per second for which fewer devices are proposed."""
MOST_UTILIZATION = 0.7
"""Model FLOPs utilization that no published run exceeds; it bounds what fewer devices can reach."""


@dataclass(frozen=True, kw_only=True)
class Nearby:
    """The best plan of a question near the one that was asked."""

    batch_size: int
    num_devices: int
    best: Candidate
    gain: float
    """Relative change of samples per second, compared with the answer to the question that was asked."""


def search_within(question: Question) -> Answer:
    """Return the answer for all devices, or for fewer if the batch divides over these only and the result is better.

    Better is faster, or equal within model error without a split of the model; `Answer.num_idle` counts the others.
    """
    answer = search(question)
    size, best = question.cluster.num_devices, answer.best
    if best is None or question.batch_size % size == 0:
        return answer
    fewer = max(_sizes_that_divide(question), default=0)
    if fewer * MOST_UTILIZATION < size * best.time.mfu:
        return answer
    part = search(_on(question, fewer))
    if part.best is None or choose([best, part.best]) is best:
        return answer
    return dataclasses.replace(part, num_idle=size - fewer)


def nearest_batches(answer: Answer) -> tuple[Nearby, ...]:
    """Return the next smaller and larger batch that the devices divide, if they train more samples per second."""
    question, best = answer.question, answer.best
    size = question.cluster.num_devices + answer.num_idle
    if best is None or question.batch_size % size == 0:
        return ()
    below = question.batch_size // size * size
    found = []
    for batch_size in (below, below + size):
        if 0 < batch_size <= MOST_GROWTH * question.batch_size:
            near = _near(answer, dataclasses.replace(_on(question, size), batch_size=batch_size))
            if near is not None and near.gain >= LEAST_GAIN:
                found.append(near)
    return tuple(found)


def fewest_devices(answer: Answer) -> Nearby | None:
    """Return the fewest devices, by halving, that train nearly as many samples per second; None if all are needed."""
    question, best = answer.question, answer.best
    found: Nearby | None = None
    size = question.cluster.num_devices
    while best is not None and size % 2 == 0 and _is_cluster(question.cluster, size // 2):
        size //= 2
        if (1 - MOST_LOSS) * best.time.mfu * question.cluster.num_devices > MOST_UTILIZATION * size:
            break
        near = _near(answer, _on(question, size))
        if near is None or near.gain < -MOST_LOSS:
            break
        found = near
    return found


def _near(answer: Answer, question: Question) -> Nearby | None:
    """Return the best plan of another question beside an answer; None if no plan fits."""
    best = search(question).best
    if best is None or answer.best is None:
        return None
    return Nearby(
        batch_size=question.batch_size,
        num_devices=question.cluster.num_devices,
        best=best,
        gain=best.time.samples_per_second / answer.best.time.samples_per_second - 1,
    )


def _on(question: Question, num_devices: int) -> Question:
    return dataclasses.replace(question, cluster=dataclasses.replace(question.cluster, num_devices=num_devices))


def _sizes_that_divide(question: Question) -> Iterator[int]:
    """Yield the numbers of fewer devices that divide the batch."""
    for size in divisors(question.batch_size):
        if size < question.cluster.num_devices and _is_cluster(question.cluster, size):
            yield size


def _is_cluster(cluster: Cluster, num_devices: int) -> bool:
    """Whether this many devices are a part of one node, or whole nodes."""
    return num_devices <= cluster.node.num_devices or num_devices % cluster.node.num_devices == 0
