"""Common mistakes in job files: errors of torch and Python that become a JobError with a fix."""

from __future__ import annotations

import re
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import JobError
from shardwise.job.losses import LISTS_FIX
from shardwise.runs.recorder import Frame

if TYPE_CHECKING:
    from collections.abc import Iterator


class Mistake(NamedTuple):
    """A message of torch or Python, and the fact and the fix that replace it.

    `fact` and `fix` may contain {0}, {1} ... for the groups of the pattern and {where} for the user's innermost line.
    """

    code: str
    pattern: str
    fact: str
    fix: str


MISTAKES = (
    Mistake(
        "job.forward-arguments",
        r"^(\w+\.forward\(\) (?:got an unexpected keyword argument '\w+'|missing .*|takes .* were given))",
        "{0}, because Job.forward passes a dict batch as keyword arguments, and a tuple without its last entry",
        'write Job(forward=lambda model, batch: model(batch["input"])) with the entries that the model accepts',
    ),
    Mistake(
        "loss.target-dtype",
        r"expected (?:target dtype to be Long or Byte, but got|scalar type Long but found) (\w+)",
        "the targets of the batch have dtype {0}, but cross entropy with class indices requires int64",
        "return target.long() from the dataset of Job.data",
    ),
    Mistake(
        "loss.target-out-of-range",
        r"Target (-?\d+) is out of bounds",
        "target {0} of the batch must be below the number of classes of the model's output",
        "set the number of outputs of Job.model to the number of classes, or correct the targets of Job.data",
    ),
    Mistake(
        "data.samples-of-lists",
        r"must be Tensor, not list|'list' object has no attribute '(?:size|shape|device)'",
        "{where} uses a list as a tensor: if samples of Job.data have lists of numbers, batches have lists of columns",
        LISTS_FIX,
    ),
    Mistake(
        "data.samples-unequal",
        r"each element in list of batch should be of equal size|stack expects each tensor to be equal size",
        "the samples of Job.data have unequal lengths, which torch's default collate cannot stack",
        "set Job(collate=transformers.DataCollatorWithPadding(tokenizer)) or another function that pads samples",
    ),
    Mistake(
        "job.device-by-hand",
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available",
        "{where} moves a tensor to a GPU, but this rank has no GPU",
        'remove .cuda() and .to("cuda"): batches and parameters are on the device of the rank',
    ),
    Mistake(
        "job.device-by-hand",
        r"Expected all tensors to be on the same device|is not on the expected device",
        "{where} combines tensors on different devices",
        'create tensors with device=x.device, and constants of a module by self.register_buffer("name", tensor)',
    ),
)


@contextmanager
def explained_mistakes() -> Iterator[None]:
    """Raise a JobError with a fix in place of an error that a known mistake in the job causes."""
    try:
        yield
    except (TypeError, RuntimeError, IndexError, AttributeError, AssertionError) as error:
        found = explain_mistake(error)
        if found is None:
            raise
        raise found from error


def explain_mistake(error: Exception) -> JobError | None:
    """Return the JobError for an error that a known mistake causes, or None for other errors."""
    for mistake in MISTAKES:
        match = re.search(mistake.pattern, str(error))
        if match is not None:
            fact = mistake.fact.format(*match.groups(), where=_user_line(error))
            return JobError(fact, code=mistake.code, fix=mistake.fix)
    return None


def _user_line(error: Exception) -> str:
    """Return the innermost function of the user's own code in the traceback, with file and line."""
    found = "the job"
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if Frame(code.co_filename, line, code.co_name).is_users:
            found = f"{code.co_qualname} ({Path(code.co_filename).name}:{line})"
    return found
