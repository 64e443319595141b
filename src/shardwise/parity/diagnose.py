"""Diagnosis of a divergence: hypotheses in the order of training; each is a pure function of the evidence."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from shardwise.parity.capture import fingerprint
from shardwise.parity.causes import (
    depends_on_grouping,
    double_scaling,
    local_buffers,
    lost_use,
    mean_of_means,
    missing_all_reduce,
    no_gradient,
    repeated_bias,
    rounded_gradients,
    scaled_parameters,
    skipped_last,
    skipped_micro_batch,
    state_between_passes,
    wrong_positions,
    wrong_shard,
    wrong_tied_shard,
)
from shardwise.parity.compare import SMALL, ratio, relative, relative_gaps
from shardwise.parity.evidence import misplaced_pieces
from shardwise.parity.spec import KEYED, RANDOM, UNKNOWN, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.parity.capture import Prints
    from shardwise.parity.evidence import Evidence


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return a finding with the first cause that explains the evidence, or with an unknown cause."""
    for hypothesis in HYPOTHESES:
        finding = hypothesis(evidence)
        if finding is not None:
            return [finding]
    return [_unknown(evidence)]


def other_initial_weights(evidence: Evidence) -> Finding | None:
    """Return a finding if the initial values differ between the plan and one process, or between ranks."""
    first = evidence.first
    if first.kind != "initial value":
        return None
    name = first.name.partition(" [")[0]
    if name in evidence.start and name in evidence.expected_start:
        places = misplaced_pieces(evidence.start[name], evidence.expected_start[name], evidence.degrees)
        if places is not None:
            return wrong_shard(evidence, name, f"its initial value has {places}", None)
    return Finding(
        cause="other initial weights",
        evidence=f"{len(evidence.comparison.deviating)} tensors differ between {first.between}, {name} most",
        parameter=name,
        ranks=_odd_ranks([each.parameters[0] for each in evidence.traced], first.name),
    )


def other_batches(evidence: Evidence) -> Finding | None:
    """Return a finding if the data-parallel ranks together read different rows than one process."""
    layout = evidence.plan.layout
    for step, wanted in enumerate(evidence.expected.rows[: evidence.step + 1]):
        by_dp_rank: dict[int, list[str]] = {}
        odd: list[int] = []
        for each in evidence.traced:  # ranks that share a data-parallel rank must read the same rows
            rows = each.rows[step]
            if by_dp_rank.setdefault(layout.data_index(each.rank), rows) != rows:
                odd.append(each.rank)
        found = Counter(chain.from_iterable(by_dp_rank.values()))
        missing, extra = Counter(wanted) - found, found - Counter(wanted)
        if not (missing or extra or odd):
            continue
        if missing and not extra and evidence.micro_batches < evidence.plan.accumulation:
            return skipped_last(evidence, step, f"{missing.total()} rows of step {step + 1} were read by no rank")
        ranks = odd or [each.rank for each in evidence.traced if extra.keys() & set(each.rows[step])]
        return Finding(
            cause="other batches",
            evidence=f"of {len(wanted)} rows of step {step + 1}, {missing.total()} were read by no rank,"
            f" {extra.total()} rows were read that one process did not read"
            + (f", and ranks {odd} read different rows than their model-parallel peers" if odd else ""),
            step=step,
            ranks=tuple(ranks),
        )
    return None


def not_finite(evidence: Evidence) -> Finding | None:
    """Return a finding if one process also has non-finite gradients, which cannot be compared."""
    bad = [name for name, gradient in evidence.expected_gradients.items() if not bool(gradient.isfinite().all())]
    if not bad:
        return None
    return Finding(
        cause="not finite in one process",
        evidence=f"the gradient of {bad[0]} in step {evidence.nth} is not finite in one process either, so it cannot"
        " be compared",
        parameter=bad[0],
        step=evidence.step,
    )


def non_deterministic(evidence: Evidence) -> Finding | None:
    """Return a finding if a second run of the same plan has different gradients."""
    first = evidence.first
    for step in range(evidence.step + 1):
        for one, other in zip(evidence.traced, evidence.again, strict=True):
            gaps = _print_gaps(one.gradients[step], other.gradients[step])
            name = max(gaps, key=lambda key: gaps[key])
            if gaps[name] > 0.1 * min(first.relative, 1.0):
                return Finding(
                    cause="non-deterministic operation",
                    evidence=f"gradient {name} of step {step + 1} on rank {one.rank} differs by {gaps[name]:.1e}"
                    " between two runs of the same plan",
                    parameter=name,
                    step=step,
                    ranks=(one.rank,),
                )
    return None


def unsynced_clipping(evidence: Evidence) -> Finding | None:
    """Return a finding if gradients agree but the gradient norm for clipping does not."""
    first = evidence.first
    if first.kind != "gradient norm" or first.step is None:
        return None
    step = first.step
    wanted = evidence.expected.norms[step]
    norms = [(each.rank, each.norms[step]) for each in evidence.traced]
    ranks = tuple(
        rank for rank, norm in norms if norm is not None and wanted and abs(norm - wanted) > first.limit * wanted
    )
    known = [norm for _, norm in norms if norm is not None]
    if wanted and max(known) - min(known) <= first.limit * wanted:
        return Finding(
            cause="wrong gradient norm",
            evidence=f"the gradients of step {step + 1} agree before clipping, but every rank clips by a norm of"
            f" {known[0]:.6g}, {known[0] / wanted:.4g} times that of one process",
            step=step,
            ranks=ranks,
        )
    shown = ", ".join(f"{norm:.6g} on rank {rank}" for rank, norm in norms if norm is not None)
    return Finding(
        cause="un-synced norm clipping",
        evidence=f"the gradients of step {step + 1} agree before clipping, but they were clipped by a norm of {shown};"
        f" one process has {wanted:.6g}",
        step=step,
        ranks=ranks,
    )


def stale_buffers(evidence: Evidence) -> Finding | None:
    """Return a finding if all parameters agree but buffers do not."""
    first = evidence.first
    if first.kind != "buffer":
        return None
    wanted = evidence.expected.buffers
    farthest = {each.rank: max(_print_gaps(each.buffers, wanted).values(), default=0.0) for each in evidence.traced}
    ranks = tuple(rank for rank, gap in farthest.items() if gap > first.limit)
    counting = _counts_passes(evidence, first.name)
    if counting:
        return Finding(cause="state between forward passes", evidence=counting, parameter=first.name, ranks=ranks)
    return Finding(
        cause="stale buffers",
        evidence=f"parameters agree, but {len(evidence.comparison.deviating)} buffers differ from those of one process"
        f" on ranks {list(ranks)}, {first.name} most",
        parameter=first.name,
        ranks=ranks,
    )


def _counts_passes(evidence: Evidence, name: str) -> str:
    """Return evidence that a buffer changed once per micro-batch instead of once per step; empty if it did not."""
    times, key = evidence.micro_batches, name.partition(" [")[0]
    start = fingerprint(evidence.expected_start[key])[0] if key in evidence.expected_start else 0.0
    wanted = evidence.expected.buffers.get(key, (0.0, 0.0))[0] - start
    found = [each.buffers[key][0] - start for each in evidence.traced if key in each.buffers]
    if times < 2 or not wanted or not all(math.isclose(each, times * wanted) for each in found):
        return ""
    return (
        f"buffer {key} grew {times} times as much as in one process, and {evidence.plan.layout} runs {times}"
        " micro-batches a step: the buffer counts forward passes"
    )


def wrong_evaluation(evidence: Evidence) -> Finding | None:
    """Return a finding if training agrees but the final evaluation does not."""
    first = evidence.first
    if first.kind not in {"evaluation", "metric"}:
        return None
    wanted = evidence.expected.evaluation[first.name]
    found = {each.rank: each.evaluation.get(first.name, math.inf) for each in evidence.traced}
    ranks = tuple(rank for rank, value in found.items() if relative(value, wanted) > first.limit)
    return Finding(
        cause="wrong evaluation",
        evidence=f"parameters and buffers agree to the end, but the {first.name} over the test split is"
        f" {found[ranks[0]]:.6g} on rank {ranks[0]}, but {wanted:.6g} in one process",
        ranks=ranks,
    )


def wrong_update(evidence: Evidence) -> Finding | None:
    """Return a finding if gradients agree but the updated weights do not."""
    first = evidence.first
    if first.kind == "parameter":
        step, name, gap = evidence.step, first.name, first.relative
    else:
        gaps = relative_gaps(evidence.before, evidence.expected_before)
        name = max(gaps, key=lambda key: gaps[key])
        step, gap = evidence.step - 1, gaps[name]
        if gap <= evidence.tolerance:
            return None
    return Finding(
        cause="different updates",
        evidence=f"the gradients of step {step + 1} agree, but the weights after it do not: {name} differs by {gap:.1e}"
        f" between {first.between}",
        parameter=name,
        step=step,
    )


def random_numbers(evidence: Evidence) -> Finding | None:
    """Return a finding if the model samples random numbers although dropout is off."""
    drawing = tuple(each.rank for each in evidence.traced if each.draws_random)
    if not drawing:
        return None
    name = evidence.expected.drawn_by or "the model"
    return Finding(
        cause=RANDOM,
        evidence=f"{name} samples random numbers, such as functional dropout, that differ between ranks: {KEYED}",
        ranks=drawing,
    )


def lower_precision(evidence: Evidence) -> Finding | None:
    """Return a finding if the loss of an fp64 model has a lower precision."""
    dtype = evidence.expected.loss_dtype
    if evidence.plan.precision.compute != "fp64" or dtype in {"", "float64"}:
        return None
    return Finding(
        cause="lower precision inside the model",
        evidence=f"weights and inputs are fp64, but the loss is {dtype}: pass --precision fp32",
    )


HYPOTHESES: tuple[Callable[[Evidence], Finding | None], ...] = (
    lost_use,  # before initial weights, which differ if a tied weight was untied
    other_initial_weights,  # inputs first, because all later values would differ as well
    other_batches,
    not_finite,  # then conditions under which gradients cannot be compared
    non_deterministic,
    stale_buffers,  # then causes by the time of the divergence, before which all values were equal
    wrong_evaluation,
    unsynced_clipping,
    wrong_update,  # then causes that are not visible in the gradient of the step
    no_gradient,
    local_buffers,
    repeated_bias,
    wrong_positions,
    state_between_passes,  # then causes in the job, for which the plan's sum over micro-batches is correct
    depends_on_grouping,
    missing_all_reduce,
    rounded_gradients,
    double_scaling,
    scaled_parameters,
    wrong_tied_shard,
    skipped_micro_batch,
    mean_of_means,
    lower_precision,  # last, a possible but uncertain cause
    random_numbers,
)


def _unknown(evidence: Evidence) -> Finding:
    first = evidence.first
    return Finding(
        cause=UNKNOWN,
        evidence=f"initial weights and batches are equal, and a second run has equal results; {first} diverges first",
        parameter=first.name,
        step=first.step,
    )


def _print_gaps(one: Prints, other: Prints) -> dict[str, float]:
    """Return the relative differences of fingerprints by key; the scale is at least SMALL times the largest norm."""
    gaps = {}
    overall = max((norm for _, norm in [*one.values(), *other.values()]), default=0.0)
    for key in one.keys() & other.keys():
        (first, norm), (second, other_norm) = one[key], other[key]
        gaps[key] = ratio(abs(first - second), max(norm, other_norm, SMALL * overall))
    return gaps


def _odd_ranks(prints: Sequence[Prints], key: str) -> tuple[int, ...]:
    """Return the ranks whose fingerprint of a shard is not the most common one among the ranks with that shard."""
    by_rank = {rank: each[key] for rank, each in enumerate(prints) if key in each}
    if len(set(by_rank.values())) < 2:
        return ()
    common = Counter(by_rank.values()).most_common(1)[0][0]
    return tuple(rank for rank, print_ in by_rank.items() if print_ != common)
