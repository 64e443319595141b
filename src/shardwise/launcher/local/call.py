"""What a rank of `sw.launch(fn)` runs when it is not a fork of the caller: load the call, make it, keep the result."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import cloudpickle

from shardwise.environment import identify
from shardwise.launcher.local.function import portable


def main(folder: Path) -> None:
    """Call the function that lies in `folder`, and leave its result or exception there."""
    fn, args, kwargs = cloudpickle.loads((folder / "call").read_bytes())
    result = folder / f"{identify().rank}.pickle"
    try:
        result.write_bytes(pickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:
        result.write_bytes(portable(error))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
