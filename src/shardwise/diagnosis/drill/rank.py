"""What every rank of a drill runs: it arms the fault, then becomes the user's job or script."""

from __future__ import annotations

import sys

import msgspec

from shardwise.diagnosis.drill.faults import Fault, arm
from shardwise.environment import identify
from shardwise.launcher.local.target import Module, Script, become


class DrillOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank of a drill receives from its launcher."""

    fault: Fault
    target: Script | Module


def drill_target(fault: Fault, target: Script | Module) -> Module:
    """Return what ranks run in place of `target`, so that the fault is injected."""
    order = msgspec.json.encode(DrillOrder(fault=fault, target=target)).decode()
    return Module(__name__, (order,))


def main() -> None:
    """Run the rank that the environment and the order on the command line describe."""
    order = msgspec.json.decode(sys.argv[1], type=DrillOrder)
    arm(order.fault, identify().rank)
    exec(become(order.target), sys.modules["__main__"].__dict__)  # noqa: S102 - running the script is the job


if __name__ == "__main__":
    main()
