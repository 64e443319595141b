"""What a refusal is known by: the code of its error, and the values that its sentence must name; never the sentence."""

import re
from contextlib import contextmanager

import pytest

from shardwise.errors import InputError


@contextmanager
def refuses(code, *values, kind=InputError):
    """Expect an error of `kind` with this code whose sentence, fix included, names each of the values; give it back.

    Of `with refuses("plan.batch-not-divisible", 64, "63 or 66") as refused: ...` the error is `refused.value`.
    """
    with pytest.raises(kind) as refused:
        yield refused
    error = refused.value
    assert error.code == code, str(error)
    _assert_names(str(error), values)


def assert_refused(written, code, *values):
    """Assert that the last line a command wrote is an error with this code that names each of the values.

    What the parser of the command line refuses itself has no code: pass an empty one.
    """
    last_line = written.strip().splitlines()[-1]
    assert last_line.startswith("shardwise: "), written
    found = re.search(r" \[([\w.-]+)\]$", last_line)
    assert (found[1] if found else "") == code, written
    _assert_names(last_line, values)


def _assert_names(sentence, values):
    assert [value for value in values if not _is_named(value, sentence)] == [], sentence


def _is_named(value, sentence):
    """Whether a sentence holds a text, or a whole number that is not part of a longer one or of a name."""
    if isinstance(value, int):
        return re.search(rf"(?<![\w.-]){value}(?!\w|\.\d)", sentence) is not None
    return str(value) in sentence
