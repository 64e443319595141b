"""Causes of a divergence in the gradients or parameters of one step; each is a pure function of the evidence."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import torch

from shardwise.parity.compare import relative_gaps
from shardwise.parity.evidence import (
    SAME,
    mean_gradient,
    misplaced_pieces,
    misplaced_use,
    plain_average,
    total_gradient,
)
from shardwise.parity.spec import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from shardwise.parity.evidence import Cell, Evidence


def no_gradient(evidence: Evidence) -> Finding | None:
    """Return a finding if parameters that have a gradient in one process have no gradient under the plan."""
    missing = [name for name in evidence.expected_gradients if name not in evidence.gradients]
    if not missing:
        return None
    return Finding(
        cause="no gradient",
        evidence=f"{len(missing)} parameters have no gradient in step {evidence.nth}; the first is {missing[0]}",
        parameter=missing[0],
        step=evidence.step,
    )


def state_between_passes(evidence: Evidence) -> Finding | None:
    """Return a finding if every forward pass changes the model, and the plan runs more of them than one process."""
    has_more = evidence.micro_batches > 1 or evidence.plan.layout.pp > 1
    if not has_more or evidence.repeat_gap <= max(SAME, evidence.tolerance):
        return None
    return Finding(
        cause="state between forward passes",
        evidence=f"the gradient of a micro-batch of step {evidence.nth} changes by {evidence.repeat_gap:.1e} when the"
        " model runs it again: the model counts forward passes or keeps state between them, and"
        f" {evidence.plan.layout} runs {evidence.micro_batches} micro-batches a step where one process runs 1",
        step=evidence.step,
    )


def depends_on_grouping(evidence: Evidence) -> Finding | None:
    """Return a finding if the gradient is exactly the sum over micro-batches, but the job's loss is not such a sum."""
    cells = [cell for cell in evidence.all_cells if cell.count]
    if len(cells) < 2 or not evidence.is_explained_by(mean_gradient(cells)):
        return None
    counts = f"the gradient of step {evidence.nth} is exactly the sum over {len(cells)} micro-batches divided by"
    cause, reason = "loss over the whole batch", "".join(evidence.expected.remarks[:1])
    if not reason:
        cause = "model or loss over the whole batch"
        reason = (
            "it differs from that of one process with all rows in one micro-batch: the output or loss of a row depends"
            " on the other rows of its micro-batch (minibatch statistics, prototypes, contrastive terms)"
        )
    return Finding(cause=cause, evidence=f"{counts} their count, and {reason}", step=evidence.step)


def missing_all_reduce(evidence: Evidence) -> Finding | None:
    """Return a finding if a parameter's gradients differ between ranks, and only their sum or mean is correct."""
    split = evidence.split
    if not split or len(split) < len(evidence.off):
        return None
    for name in split:
        together = torch.stack([each[name] for each in evidence.locals]).sum(0)
        wanted = {name: evidence.expected_gradients[name]}
        shares = ({name: together / divisor} for divisor in (1, *evidence.degrees))
        if not any(relative_gaps(share, wanted)[name] <= max(SAME, evidence.tolerance) for share in shares):
            return None
    every = len(split) == len(evidence.expected_gradients)
    return Finding(
        cause="missing all-reduce",
        evidence=f"the gradient of {'every parameter' if every else ', '.join(split)} in step {evidence.nth} differs"
        " between ranks, and only the sum or mean over ranks equals that of one process",
        parameter=split[0],
        step=evidence.step,
        ranks=tuple(range(len(evidence.locals))),
    )


def double_scaling(evidence: Evidence) -> Finding | None:
    """Return a finding if all gradients are wrong by the same factor."""
    found, wanted = evidence.gradients, evidence.expected_gradients
    if not evidence.off or found.keys() != wanted.keys():
        return None
    square = sum(float(value.double().square().sum()) for value in wanted.values())
    product = sum(float((found[name].double() * value.double()).sum()) for name, value in wanted.items())
    if not square or not product:
        return None
    factor = product / square
    if not evidence.is_explained_by({name: value * factor for name, value in wanted.items()}):
        return None
    layout = evidence.plan.layout
    known = {
        "the data-parallel size": layout.dp,
        "the number of micro-batches": evidence.plan.accumulation,
        "the number of ranks": layout.world_size,
        "the tensor-parallel degree": layout.tp,
    }
    text = f"every gradient of step {evidence.nth} is {factor:.6g} times that of one process"
    for meaning, value in known.items():
        if value > 1 and abs(max(factor, 1 / factor) / value - 1) < 1e-6:
            text += f" ({meaning})" if factor > 1 else f" (divided by {meaning})"
            break
    return Finding(cause="double loss scaling", evidence=text, step=evidence.step)


def mean_of_means(evidence: Evidence) -> Finding | None:
    """Return a finding if the gradient is an unweighted average of means over different counts."""
    by_rank: list[list[Cell]] = []
    by_number: dict[int, list[Cell]] = {}
    for row in evidence.cells:
        counted = [cell for cell in row if cell.count]
        by_rank.append(counted)
        for number, cell in enumerate(counted):
            by_number.setdefault(number, []).append(cell)
    groupings = {
        "ranks": [row for row in by_rank if row],
        "micro-batches": list(by_number.values()),
        "micro-batches of all ranks": [[cell] for cell in evidence.all_cells if cell.count],
    }
    for label, groups in groupings.items():
        counts = [sum(cell.count for cell in group) for group in groups]
        if len(set(counts)) < 2:  # the unweighted average of means over equal counts is the overall mean
            continue
        if evidence.is_explained_by(plain_average([mean_gradient(group) for group in groups])):
            return Finding(
                cause="mean of means",
                evidence=f"the gradient of step {evidence.nth} is the unweighted average over {label}, whose counts"
                f" differ ({', '.join(f'{count:g}' for count in counts)})",
                step=evidence.step,
            )
    return None


def skipped_micro_batch(evidence: Evidence) -> Finding | None:
    """Return a finding if the gradient equals that of a step without the last micro-batch."""
    if not evidence.cells or min(map(len, evidence.cells)) < 2:
        return None
    without = [cell for row in evidence.cells for cell in row[:-1]]
    total = sum(cell.count for cell in evidence.all_cells)
    kept = sum(cell.count for cell in without)
    for divisor in {total, kept} - {0}:
        if evidence.is_explained_by({name: value / divisor for name, value in total_gradient(without).items()}):
            text = f"the gradient is that of the step without the last {total - kept:g} of {total:g} counted elements"
            return skipped_last(evidence, evidence.step, text)
    return None


def wrong_tied_shard(evidence: Evidence) -> Finding | None:
    """Return a finding if the contribution of one module to a tied gradient was added to the shard of another rank."""
    if len(evidence.off) != 1:
        return None
    (name,) = evidence.off
    found, wanted = evidence.gradients.get(name), evidence.expected_gradients.get(name)
    if found is None or wanted is None:
        return None
    places = misplaced_pieces(found, wanted, evidence.degrees) or misplaced_use(
        found, evidence.uses.get(name, ()), evidence.degrees
    )
    if places is None:
        return None
    return wrong_shard(evidence, name, f"its gradient has {places}", evidence.step)


def skipped_last(evidence: Evidence, step: int, text: str) -> Finding:
    """Return the finding that the last micro-batch of a step was skipped."""
    ranks = tuple(each.rank for each in evidence.traced)
    return Finding(cause="skipped last micro-batch", evidence=f"step {step + 1}: {text}", step=step, ranks=ranks)


def wrong_shard(evidence: Evidence, name: str, text: str, step: int | None) -> Finding:
    """Return the finding that the shards of a parameter are in the wrong order."""
    others = evidence.tied.get(name, ())
    tied = f" (tied to {', '.join(others)})" if others else ""
    return Finding(
        cause="wrong shard of a tied weight" if others else "wrong shard",
        evidence=f"{name}{tied}: {text}",
        parameter=name,
        step=step,
    )


# Causes of a divergence in some parameters of a step; each is a pure function of the evidence.


_LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Lower precisions, the least precise first, because every bf16 value is also representable in fp32."""
_MOST_BY_CHANCE = 0.05
"""Fraction of a correct gradient's nonzero elements that may be representable in a lower precision by chance."""

_MOST_ROUNDED_ALIKE = 0.95


def rounded_gradients(evidence: Evidence) -> Finding | None:
    """Return a finding if gradients were reduced or communicated in a lower precision than they were computed in."""
    off = [name for name in evidence.off if name in evidence.gradients and name in evidence.expected_gradients]
    found = _flat(evidence.gradients, off)
    wanted = _flat(evidence.expected_gradients, off)
    for precision, dtype in _LOWER.items():
        if not _is_same(found, wanted, evidence.plan.layout.world_size * torch.finfo(dtype).eps):
            continue
        was_summed = _representable(found, dtype) == 1 and _representable(wanted, dtype) < _MOST_BY_CHANCE
        if was_summed:
            reason = f"every element is representable in {precision}, unlike in one process"
        elif _is_sum_of_rounded(evidence, off, found, dtype):
            reason = f"they are sums of the gradients of data-parallel ranks, each rounded to {precision}"
        else:
            continue
        return Finding(
            cause="gradients in lower precision",
            evidence=f"{len(off)} gradients of step {evidence.nth} differ by rounding to {precision}: {reason}",
            parameter=off[0],
            step=evidence.step,
        )
    return None


def scaled_parameters(evidence: Evidence) -> Finding | None:
    """Return a finding if some gradients are wrong by a common factor and all others are correct."""
    off = evidence.off
    if not off or len(off) == len(evidence.expected_gradients) or evidence.split:
        return None
    if any(name not in evidence.gradients or name not in evidence.expected_gradients for name in off):
        return None
    found = _flat(evidence.gradients, off)
    wanted = _flat(evidence.expected_gradients, off)
    square = float(wanted @ wanted)
    factor = float(found @ wanted) / square if square else 0.0
    if not factor or not _is_same(found, factor * wanted, max(SAME, evidence.tolerance)):
        return None
    shown = ", ".join(off[:3]) + (f" and {len(off) - 3} more" if len(off) > 3 else "")
    return Finding(
        cause="scaled gradient",
        evidence=f"the gradient of {shown} in step {evidence.nth} is {factor:.6g} times that of one process, and the"
        f" other {len(evidence.expected_gradients) - len(off)} gradients agree",
        parameter=off[0],
        step=evidence.step,
    )


def repeated_bias(evidence: Evidence) -> Finding | None:
    """Return a finding if each tensor-parallel rank added the bias, so that the sum contains it several times."""
    for times, gradients in evidence.repeated_bias.items():
        names = [name for name in gradients if name in evidence.gradients]
        found = _flat(evidence.gradients, names)
        if not _is_same(found, _flat(gradients, names), max(SAME, evidence.tolerance)):
            continue
        if _is_same(found, _flat(evidence.expected_gradients, names), evidence.tolerance):
            continue
        return Finding(
            cause="bias added several times",
            evidence=f"the gradient of step {evidence.nth} is that of one process in which row-parallel modules add"
            f" their bias {times} times: add the bias once, after the all-reduce over tensor-parallel ranks",
            step=evidence.step,
        )
    return None


def wrong_positions(evidence: Evidence) -> Finding | None:
    """Return a finding if each context-parallel rank counts positions from the start of its shard of the sequence."""
    if not evidence.restarted_positions or not evidence.is_explained_by(evidence.restarted_positions):
        return None
    degree = evidence.plan.layout.cp
    return Finding(
        cause="wrong positions",
        evidence=f"the gradient of step {evidence.nth} is that of one process in which positions begin at 0 in each of"
        f" the {degree} slices of a sequence",
        step=evidence.step,
        ranks=tuple(each.rank for each in evidence.traced if evidence.plan.layout.coordinate(each.rank).cp),
    )


def lost_use(evidence: Evidence) -> Finding | None:
    """Return a finding if only some of the modules that share a parameter contributed to its gradient."""
    for name, others in evidence.tied.items():
        found, uses = evidence.gradients.get(name), evidence.uses.get(name, ())
        if found is None or name not in evidence.off:
            continue
        apart = [other for other in others if other in evidence.gradients]
        if apart:
            text = f"{', '.join(apart)} is a separate parameter under the plan, but tied to {name} in one process"
            return _untied(evidence, name, text)
        if _sums_up_some(found, uses, max(SAME, evidence.tolerance)):
            names = ", ".join([name, *others])
            text = f"the plan sums only some of the gradients of {names} in step {evidence.nth}"
            return _untied(evidence, name, text)
    return None


def local_buffers(evidence: Evidence) -> Finding | None:
    """Return a finding if a buffer that the forward pass reads differs between ranks."""
    if evidence.step == 0 or not evidence.expected.buffers:
        return None
    prints = [each.buffers for each in evidence.traced]
    for one, other in combinations(range(len(prints)), 2):
        shared = prints[one].keys() & prints[other].keys()
        apart = sorted(key for key in shared if not _are_prints_same(prints[one][key], prints[other][key]))
        if apart:
            return Finding(
                cause="local buffers",
                evidence=f"buffer {apart[0]} differs between ranks {one} and {other}, the parameters before step"
                f" {evidence.nth} agree, and {evidence.first} diverges first: the forward pass reads this buffer",
                parameter=apart[0],
                step=evidence.step,
                ranks=(one, other),
            )
    return None


def _is_sum_of_rounded(evidence: Evidence, names: Sequence[str], found: Tensor, dtype: torch.dtype) -> bool:
    """Return whether gradients are sums of individually rounded local gradients, up to ties in the last bit of fp64."""
    count = sum(cell.count for cell in evidence.all_cells)
    if not count or any(not cell.gradients.keys() >= set(names) for cell in evidence.all_cells):
        return False
    total = torch.zeros_like(found)
    for row in evidence.cells:
        own = sum((_flat(cell.gradients, names) for cell in row), torch.zeros_like(found))
        total += (own / count).to(dtype).double()
    exact = (total - found).abs() <= SAME * torch.finfo(dtype).eps * found.abs().max()
    return float(exact.double().mean()) > _MOST_ROUNDED_ALIKE


def _untied(evidence: Evidence, name: str, text: str) -> Finding:
    return Finding(cause="tied weight trained apart", evidence=text, parameter=name, step=evidence.first.step)


def _sums_up_some(found: Tensor, uses: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether a gradient equals the sum over some, but not all, modules that use the parameter."""
    for count in range(1, len(uses)):
        for chosen in combinations(uses, count):
            if relative_gaps({"": torch.stack(chosen).sum(0)}, {"": found})[""] <= tolerance:
                return True
    return False


def _representable(values: Tensor, dtype: torch.dtype) -> float:
    """Return the fraction of nonzero elements that are representable in a dtype."""
    values = values[values != 0]
    return float((values.to(dtype).double() == values).double().mean()) if len(values) else 0.0


def _is_same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max()) if len(other) else False


def _flat(gradients: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return the named gradients as one fp64 vector."""
    empty = torch.zeros(0, dtype=torch.float64)
    return torch.cat([empty, *(gradients[name].double().flatten() for name in names)])


def _are_prints_same(one: tuple[float, float], other: tuple[float, float]) -> bool:
    scale = max(one[1], other[1])
    return abs(one[0] - other[0]) <= SAME * scale
