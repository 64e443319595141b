"""Naming a cluster: "8xH100", "2xp4d.24xlarge", "4x8xA100-40GB", "this"."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.errors import HardwareError
from shardwise.hardware.catalogue import Catalogue, read_catalogue
from shardwise.hardware.machine import Cluster, Device
from shardwise.hardware.memory import available_memory
from shardwise.hardware.probe import probe_gpus, usable_cores

if TYPE_CHECKING:
    from pathlib import Path

_FORMS = "write COUNTxDEVICE, NODESxNODE or NODESxDEVICESxDEVICE, such as 8xH100, 2xp4d.24xlarge, 4x8xA100-40GB"


def parse_cluster(text: str, extra: Path | None = None) -> Cluster:
    """Return the cluster that a text names; `extra` is a catalogue of the user's on top of the others."""
    counts, name = _split(text)
    if name.lower() == "this":
        if len(counts) > 1:
            raise HardwareError(
                f"cluster {text!r} counts twice",
                code="hardware.cluster-second-count",
                fix="write this, or 2xthis for two ranks of it",
            )
        return this_machine(counts[0] if counts else None, extra)
    catalogue = read_catalogue(extra)
    found = catalogue.find(name)
    if not isinstance(found, Device):
        if len(counts) > 1:
            raise HardwareError(
                f"cluster {text!r} counts the devices of {found.name}, which are {found.num_devices}",
                code="hardware.cluster-second-count",
                fix=f"write {counts[0]}x{name}",
            )
        return Cluster(node=found, num_devices=found.num_devices * (counts[0] if counts else 1))
    node = catalogue.node_of(found)
    if len(counts) > 1:
        node = node.with_devices(counts[1])
        return Cluster(node=node, num_devices=counts[0] * counts[1])
    return Cluster(node=node, num_devices=counts[0] if counts else 1)


def this_machine(num_devices: int | None = None, extra: Path | None = None) -> Cluster:
    """Return the machine at hand: its GPUs (all, or so many), else its CPU shared by so many ranks (1)."""
    catalogue, gpus = read_catalogue(extra), probe_gpus()
    if not gpus:
        return _cpu_cluster(catalogue, num_devices or 1)
    devices = {device.name: device for device in map(catalogue.recognise, gpus)}
    if len(devices) > 1:
        raise HardwareError(
            f"this machine has GPUs of several kinds ({', '.join(devices)})",
            code="hardware.mixed-gpus",
            fix="show equal ones only, by CUDA_VISIBLE_DEVICES",
        )
    if num_devices is not None and num_devices > len(gpus):
        raise HardwareError(
            f"this machine has {len(gpus)} GPUs, not {num_devices}",
            code="hardware.too-few-gpus",
            fix=f"use at most {len(gpus)}",
        )
    (device,) = devices.values()
    node = replace(
        catalogue.node_of(device).with_devices(len(gpus)),
        name="this machine",
        host_memory_bytes=available_memory(),
        host_cores=usable_cores(),
        aliases=(),
    )
    return Cluster(node=node, num_devices=num_devices or len(gpus))


def _cpu_cluster(catalogue: Catalogue, ranks: int) -> Cluster:
    """Share cores and memory of this host among ranks; rates per core are the catalogue's."""
    listed = catalogue.node_of(catalogue.devices["cpu"])
    cores, memory = usable_cores(), available_memory()
    share = cores / ranks / (listed.host_cores / listed.num_devices)
    device = replace(
        listed.device,
        name=f"cpu-{cores / ranks:g}c",  # calibrations of ranks with other shares of the cores stay apart
        memory_bytes=memory // ranks,
        memory_bandwidth=listed.device.memory_bandwidth * share,
        flops={dtype: rate * share for dtype, rate in listed.device.flops.items()},
        matmul={dtype: rate * share for dtype, rate in listed.device.matmul.items()},
        aliases=(),
        assumed=True,
        source=f"cores and memory: this host; rates: assumption, {listed.device.source}",
    )
    node = replace(
        listed,
        name="this machine",
        device=device,
        num_devices=ranks,
        host_memory_bytes=memory,
        host_cores=cores,
        aliases=(),
    )
    return Cluster(node=node, num_devices=ranks)


def _split(text: str) -> tuple[tuple[int, ...], str]:
    """Cut "4x8xA100" into (4, 8) and "A100"."""
    match = re.fullmatch(r"((?:[-+]?\d+\s*x\s*)*)(\S.*)", text.strip(), re.IGNORECASE)
    if match is None:
        raise HardwareError(f"cluster {text!r} names nothing", code="hardware.cluster-empty", fix=_FORMS)
    counts = tuple(int(count) for count in re.findall(r"[-+]?\d+(?=\s*x)", match[1], re.IGNORECASE))
    if len(counts) > 2:
        raise HardwareError(f"cluster {text!r} is not a count and a name", code="hardware.cluster-syntax", fix=_FORMS)
    for count in counts:
        if count < 1:
            raise HardwareError(
                f"cluster {text!r} counts {count}",
                code="hardware.cluster-count-invalid",
                fix="use whole numbers of at least 1",
            )
    return counts, match[2]
