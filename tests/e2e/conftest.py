"""How the commands of the gallery are started: by a forked `shardwise launch` here, as written in `make prove`."""

import re

import pytest

from e2e.gallery import FORKED


@pytest.fixture(params=["forked", pytest.param("written", marks=pytest.mark.prove)])
def launched(request):
    """A function from commands of a README to those that are run.

    torchrun imports torch once more than there are ranks, `shardwise launch` in a fork of the test process never.
    """
    return list if request.param == "written" else by_forks


def by_forks(lines):
    """Return the commands with a forked `shardwise launch` in place of torchrun; those that are then alike, once."""
    return list(
        dict.fromkeys(re.sub(r"^(torchrun|shardwise launch) ", f"{FORKED}shardwise launch ", line) for line in lines)
    )
