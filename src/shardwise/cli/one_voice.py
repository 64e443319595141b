"""How a command ends when it cannot go on: one sentence and an exit code, also where mpirun runs many of it."""

from __future__ import annotations

import os
import re
import time

from shardwise.environment import MPI_STARTERS, Identity, identify
from shardwise.errors import EnvironmentVariablesError
from shardwise.runs.console import complain
from shardwise.runs.exitcodes import BAD_INPUT

_PATIENCE_S = 10.0
"""How much later than the others rank 0 may come to the same end: ranks that share few cores import one by one."""

_JOB = "JOB.py"
"""What packages that know no command line write for the job file in a fix."""


def end(code: int, words: str) -> int:
    """Say `words` and return `code`, the exit code; ranks of mpirun end here, and one of them speaks.

    What one rank refuses as bad input the others refuse too, and mpirun ends all of them when the first has ended
    badly: so those after rank 0 wait to be ended, and speak if nobody does. Any other end may be one rank's alone.
    """
    me = _identity()
    if me.world_size == 1 or me.source not in MPI_STARTERS:
        complain(words)
        return code
    if me.rank > 0 and code == BAD_INPUT:
        time.sleep(_PATIENCE_S)
    complain(words)
    os._exit(code)  # without MPI's farewell, in which ranks wait for each other


def with_job_file(sentence: str, *arguments: str) -> str:
    """Return an error's sentence with the job file that is among the arguments, in place of the JOB.py of its fix."""
    own = next((each for each in arguments if re.fullmatch(r"[^=]+\.py(:\w+)?", each)), _JOB)
    return sentence.replace(_JOB, own)


def _identity() -> Identity:
    try:
        return identify()
    except EnvironmentVariablesError:
        return Identity()
