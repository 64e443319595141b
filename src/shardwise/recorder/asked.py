"""What a launcher asks of a rank beside its record, told by variables that the rank takes away at once."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.environment import adopt, variables

_DETERMINISTIC = "SHARDWISE_DETERMINISTIC"
_CHECK_REPLICAS = "SHARDWISE_CHECK_REPLICAS"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How a rank is to run."""

    deterministic: bool = False
    check_replicas: int = 0
    """Optimizer steps between fingerprints of what DDP keeps equal; 0 takes none."""

    def variables(self) -> dict[str, str]:
        """Return the variables that tell a rank so."""
        told = {_DETERMINISTIC: "1" if self.deterministic else "", _CHECK_REPLICAS: str(self.check_replicas or "")}
        return {name: value for name, value in told.items() if value}


def take_asked() -> Asked:
    """Return what this process was asked for; its own children are not."""
    environ = variables("")
    told = {name: environ.pop(name) for name in (_DETERMINISTIC, _CHECK_REPLICAS) if name in environ}
    if told:
        adopt(environ)
    return Asked(deterministic=_DETERMINISTIC in told, check_replicas=int(told.get(_CHECK_REPLICAS) or 0))
