"""How the commands of the gallery are started: by `shardwise launch` here, as they are written in `make prove`."""

import re

import pytest


@pytest.fixture(params=["forked", pytest.param("written", marks=pytest.mark.prove)])
def launched(request):
    """A function from commands of a README to those that are run.

    torchrun imports torch once more than there are ranks, `shardwise launch` once for all of them.
    """
    return list if request.param == "written" else by_shardwise


def by_shardwise(lines):
    """Return the commands with `shardwise launch` in place of torchrun; those that are then alike, once."""
    return list(dict.fromkeys(re.sub(r"^torchrun ", "shardwise launch ", line) for line in lines))
