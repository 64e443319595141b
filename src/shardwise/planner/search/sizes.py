"""The best number of devices: for a batch that does not divide over all of them, or up to a limit.

The idea: a batch that the devices do not divide leaves the search few layouts of all devices, and fewer of them may be
faster. Layouts of fewer devices are therefore searched too, in the order of a lower bound of their time: every number
of devices inside a node, and layouts of whole nodes whose data-parallel degree is among the largest that divide the
batch. The invariant: more devices are never slower than fewer, up to the ties of `choose`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from shardwise.hardware.machine import Cluster
from shardwise.planner.search.choices import Degrees, degrees_of, divisors, slices, splits_model
from shardwise.planner.search.search import FAMILY_TIE, Answer, Search, choose, search

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.hardware.machine import NodeType
    from shardwise.planner.search.question import Question
    from shardwise.planner.search.search import Candidate

SPLIT_GAIN = 2.5
"""How much faster than replicas on fewer devices a model must be split because of its batch size alone."""
MOST_NODES = 16
"""Nodes up to which all numbers of them, and all pipeline degrees, are searched; above, two for each power of two."""
NUM_HALVINGS = 3
"""How often the data-parallel degree is halved: fewer ranks are faster only if communication dominates."""
MOST_UTILIZATION = 0.7
"""Model FLOPs utilization that no published run exceeds; it bounds what fewer devices can reach."""
SHOWN = 2.0
"""Step time, relative to the shortest, up to which other numbers of devices are shown."""


def search_fewer(question: Question) -> Answer:
    """Return the answer for the best number of devices of the cluster, whose batch does not divide over all of them.

    The best is the fastest, or within model error the simplest plan; a model that fits on one device is split only if
    that is SPLIT_GAIN times as fast. `Answer.num_idle` counts the other devices.
    """
    size = question.cluster.num_devices
    found = plans_of_sizes(question)
    best = choose(found, question.widest)
    if best is None:
        return search(question)
    whole = _unsplit(found, best, question.widest)
    fewer = (whole or best).plan.layout.world_size
    answer = search(resized(question, fewer))
    return dataclasses.replace(answer, num_idle=size - fewer, faster_split=best if whole is not None else None)


def plans_of_sizes(question: Question) -> list[Candidate]:
    """Return the fast plans on all devices of the cluster or on fewer; with offload only if no other plan fits."""
    for offload in (False, True):
        found = _whole_nodes(question, offload=offload)
        per_node, limit = question.cluster.node.num_devices, question.cluster.num_devices
        for size in range(min(per_node - 1, limit), 0, -1):
            least = min((each.time.seconds for each in found), default=math.inf)
            found += _inside_node(resized(question, size), least, offload=offload)
        if found:
            return found
    return []


def _unsplit(found: list[Candidate], best: Candidate, widest: float) -> Candidate | None:
    """Return the best plan that does not split the model, if a replica fits and a split is hardly faster."""
    whole = [each for each in found if not splits_model(each.plan)]
    if not splits_model(best.plan) or not any(each.family == "ddp" for each in whole):
        return None
    other = choose(whole, widest)
    if other is None or other.time.seconds > SPLIT_GAIN * best.time.seconds:
        return None
    return other


def _inside_node(question: Question, least_s: float, *, offload: bool) -> list[Candidate]:
    """Return the predicted plans on a number of devices of one node; none if they are too few to be as fast."""
    shape, size = question.model.plain, question.cluster.num_devices
    found = Search(question, quick=True, split_gain=SPLIT_GAIN, least_s=least_s)
    found.run(found.ordered(degrees_of(shape, size, size, question.batch_size)), offload=offload)
    return found.candidates()


def _whole_nodes(question: Question, *, offload: bool) -> list[Candidate]:
    """Return the predicted plans on whole nodes, those with the smallest lower bound of their time first."""
    cluster = question.cluster
    if cluster.num_devices < cluster.node.num_devices:
        return []
    found = Search(question, quick=True, split_gain=SPLIT_GAIN)
    bounds = sorted((found.least_seconds(degrees), degrees) for degrees in set(_degrees(question)))
    for bound, degrees in bounds:
        splits = degrees.pp * degrees.cp * degrees.tp > 1
        if not found.is_too_slow(bound, splits=splits):
            found.run(found.ordered([degrees]), offload=offload)
    return found.candidates()


def _degrees(question: Question) -> Iterator[Degrees]:
    """Yield the degrees of all devices, and of fewer whole nodes with the largest dp that divides the batch."""
    shape, cluster, batch = question.model.plain, question.cluster, question.batch_size
    per_node, limit = cluster.node.num_devices, cluster.num_devices
    yield from degrees_of(shape, limit, per_node, batch)
    numbers = divisors(batch)
    for tp in shape.tp_degrees:
        if per_node % tp:
            continue
        for pp in _stage_counts(shape.num_blocks if shape.stages else 1, cluster.num_nodes):
            yield from _largest(numbers, Degrees(pp, 1, tp, 1), cluster)
        for cp in slices(shape):
            if shape.heads % (cp * tp) == 0:
                yield from _largest(numbers, Degrees(1, cp, tp, 1), cluster)


def _stage_counts(most: int, num_nodes: int) -> list[int]:
    return list(range(1, most + 1)) if num_nodes <= MOST_NODES else [1, *doubled(most)]


def _largest(numbers: list[int], degrees: Degrees, cluster: Cluster) -> Iterator[Degrees]:
    """Yield degrees with the largest dp of `numbers` that fills whole nodes, and about a half, a quarter and so on."""
    limit = cluster.num_devices
    for _ in range(NUM_HALVINGS + 1):
        whole = (degrees._replace(dp=number) for number in reversed(numbers) if number * degrees.world_size <= limit)
        found = next((each for each in whole if each.world_size % cluster.node.num_devices == 0), None)
        if found is None:
            return
        yield found
        limit = found.world_size // 2


def best_size(question: Question, limit: int) -> tuple[Answer, list[Answer]]:
    """Return the result for the best number of devices up to `limit`, and the best plans of other numbers.

    The best is the smallest number whose step takes at most FAMILY_TIE longer than the shortest; without any plan, the
    limit itself. Numbers that take more than SHOWN times as long are left out if their utilization shows that.
    """
    node, answers, most_work = question.cluster.node, list[Answer](), 0.0
    sizes = {*range(1, min(limit, node.num_devices) + 1), *cluster_sizes(node, limit)}
    for size in sorted(sizes, reverse=True):
        if SHOWN * size * MOST_UTILIZATION < most_work:
            break
        answer = search(resized(question, size), quick=True)
        if answer.best is not None:
            most_work = max(most_work, size * answer.best.time.mfu)
            answers.insert(0, answer)
    if not answers:
        return search(resized(question, max(sizes))), []
    least = min(_seconds(answer) for answer in answers)
    chosen = next(answer for answer in answers if _seconds(answer) <= least * (1 + FAMILY_TIE))
    return search(chosen.question), answers


def _seconds(answer: Answer) -> float:
    return answer.best.time.seconds if answer.best is not None else math.inf


def cluster_sizes(node: NodeType, limit: int) -> list[int]:
    """Return numbers of devices up to `limit` in ascending order: divisors of a node, then whole nodes.

    Up to MOST_NODES, all numbers; above, two for each power of two, and the largest.
    """
    inside = [size for size in divisors(node.num_devices) if size <= limit]
    most = limit // node.num_devices
    nodes = {*range(2, min(most, MOST_NODES) + 1), *doubled(most)}
    if most > 1:
        nodes.add(most)
    return inside + [count * node.num_devices for count in sorted(nodes)]


def doubled(most: int) -> list[int]:
    """Return 2, 3, 4, 6, 8, 12 and so on up to `most`."""
    found = []
    for power in range(20):
        found += [factor << power for factor in (2, 3) if factor << power <= most]
    return found


def resized(question: Question, num_devices: int) -> Question:
    """Return the question for another number of the same devices, with the same batch."""
    cluster = Cluster(node=question.cluster.node, num_devices=num_devices)
    return dataclasses.replace(question, cluster=cluster)
