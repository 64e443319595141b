"""Calibrations on disk: one JSON file per device in the user's cache directory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardwise.environment import cache_directory
from shardwise.errors import HardwareError
from shardwise.hardware.calibration import Calibration, default_calibration

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.hardware.machine import Device, NodeType


def calibration_for(node: NodeType, folder: Path | None = None) -> Calibration:
    """Return what was measured for a node's device on this machine, else what the catalogue says."""
    return read_calibration(node.device, folder) or default_calibration(node)


def calibration_path(device: Device, folder: Path | None = None) -> Path:
    """Return the file of a device, which may not exist."""
    folder = folder or cache_directory() / "calibration"
    return folder / f"{re.sub(r'[^a-z0-9.]+', '-', device.name.lower())}.json"


def read_calibration(device: Device, folder: Path | None = None) -> Calibration | None:
    """Return what was measured for a device, None where nothing was; a file that cannot be read is refused."""
    import msgspec

    path = calibration_path(device, folder)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HardwareError(
            f"calibration {path} cannot be read ({error})",
            code="hardware.calibration-read-failed",
            fix="remove it, and measure again",
        ) from None
    if found.version != Calibration.version:
        raise HardwareError(
            f"calibration {path} has version {found.version}",
            code="hardware.calibration-version",
            fix="remove it, and measure again",
        )
    return found


def write_calibration(calibration: Calibration, folder: Path | None = None) -> Path:
    """Keep a calibration for later plans, in place of an older one; return its file."""
    import msgspec

    path = calibration_path(calibration.device, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
    part.replace(path)
    return path
