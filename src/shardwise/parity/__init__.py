"""Parity on the user's own job: every plan trained beside one process, and what differs named."""

from shardwise.parity.report import Finding, Gap, PlanVerdict, VerifyReport
from shardwise.parity.verify import verify

__all__ = ["Finding", "Gap", "PlanVerdict", "VerifyReport", "verify"]
