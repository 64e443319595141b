"""Clusters by name ("8xH100", "2xp4d.24xlarge", "this"), from a catalogue of devices, links and nodes."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.environment import config_directory
from shardwise.errors import HardwareError, nearest
from shardwise.hardware.machine import DTYPES, Cluster, Device, Link, NodeType
from shardwise.hardware.probe import available_memory, probe_gpus, usable_cores
from shardwise.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardwise.hardware.probe import Gpu


_FORMS = "write COUNTxDEVICE, NODESxNODE or NODESxDEVICESxDEVICE, such as 8xH100, 2xp4d.24xlarge, 4x8xA100-40GB"


def parse_cluster(text: str, extra: Path | None = None) -> Cluster:
    """Return the cluster named by `text`; the catalogue file `extra` takes precedence over the other catalogues."""
    counts, name = _split(text)
    if name.lower() == "this":
        if len(counts) > 1:
            raise HardwareError(
                f"cluster {text!r} has two counts",
                code="hardware.cluster-second-count",
                fix="write 'this', or '2xthis' for two ranks on this machine",
            )
        return this_machine(counts[0] if counts else None, extra)
    catalogue = read_catalogue(extra)
    match = re.fullmatch(r"cpu-(\d*\.?\d*[1-9]\d*)c", name.lower())
    if match and len(counts) < 2:  # the name that `this_machine` gives a rank, in the output of plan
        ranks = max(1, round(usable_cores() / float(match[1])))
        node = _cpu_cluster(catalogue, ranks).node
        if node.device.name == match[0]:
            return Cluster(node=node, num_devices=counts[0] if counts else 1)
    found = catalogue.find(name)
    if not isinstance(found, Device):
        if len(counts) > 1:
            raise HardwareError(
                f"cluster {text!r} has a device count, but a {found.name} node always has {found.num_devices} devices",
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
    """Return this machine as a cluster of `num_devices` GPUs (default: all) or, without any, CPU ranks (default: 1)."""
    catalogue, gpus = read_catalogue(extra), probe_gpus()
    if not gpus:
        return _cpu_cluster(catalogue, num_devices or 1)
    devices = {device.name: device for device in map(catalogue.identify, gpus)}
    if len(devices) > 1:
        raise HardwareError(
            f"this machine has different GPU models ({', '.join(devices)})",
            code="hardware.mixed-gpus",
            fix="select GPUs of one model with CUDA_VISIBLE_DEVICES",
        )
    if num_devices is not None and num_devices > len(gpus):
        raise HardwareError(
            f"{num_devices} GPUs were requested, but this machine has {len(gpus)}",
            code="hardware.too-few-gpus",
            fix=f"use at most {len(gpus)} GPUs",
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
    """Return a cluster of CPU ranks that share the cores and memory of this host; rates per core are assumed."""
    listed = catalogue.node_of(catalogue.devices["cpu"])
    cores, memory = usable_cores(), available_memory()
    share = cores / ranks / (listed.host_cores / listed.num_devices)
    device = replace(
        listed.device,
        name=f"cpu-{cores / ranks:g}c",  # calibrations depend on the number of cores per rank
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
    """Parse "4x8xA100" into (4, 8) and "A100"; counts may have thousands separators, as in "16,384xH100"."""
    thousands = r"(?i)(?<![a-wyz\d,-])\d{1,3}(,\d{3})+(?=\s*x)"
    text = re.sub(thousands, lambda count: count[0].replace(",", ""), text)
    _refuse_mixed(text)
    match = re.fullmatch(r"((?:[-+]?\d+\s*x\s*)*)(\S.*)", text.strip(), re.IGNORECASE)
    if match is None or not match[2].strip(" +,"):
        raise HardwareError(f"cluster {text!r} has no device or node name", code="hardware.cluster-empty", fix=_FORMS)
    counts = tuple(int(count) for count in re.findall(r"[-+]?\d+(?=\s*x)", match[1], re.IGNORECASE))
    if len(counts) > 2:
        raise HardwareError(f"cluster {text!r} has more than two counts", code="hardware.cluster-syntax", fix=_FORMS)
    for count in counts:
        if count < 1:
            raise HardwareError(
                f"counts of a cluster must be positive, got {count} in {text!r}",
                code="hardware.cluster-count-invalid",
                fix="use positive integers, such as 8xH100",
            )
    return counts, match[2]


def _refuse_mixed(text: str) -> None:
    count = re.match(r"\s*(\d[\d,]*,\d+)(?=\s*x)", text)
    if count is not None:
        raise HardwareError(
            f"cluster {text!r} has a count {count[1]!r} whose comma does not separate thousands",
            code="hardware.cluster-syntax",
            fix=f"write {text.strip().replace(count[1], count[1].replace(',', ''), 1)}",
        )
    pieces = [part.strip() for part in re.split(r"[+,]|\band\b", text)]
    parts = [part for part in pieces if part]
    if len(parts) == 1 < len(pieces):
        raise HardwareError(
            f"cluster {text!r} has a separator without a second cluster",
            code="hardware.cluster-syntax",
            fix=f"write {parts[0]}",
        )
    if len(parts) > 1:
        raise HardwareError(
            f"cluster {text!r} mixes several kinds of devices, but the ranks of a training need equal devices",
            code="hardware.cluster-mixed",
            fix=f"plan one kind at a time, such as {parts[0]}",
        )


# The catalogue: devices, links and nodes in TOML files. The user's files take precedence over the built-in one.


_BUILT_IN = Path(__file__).with_name("catalogue.toml")
_UNITS = {
    "memory_gib": ("memory_bytes", GIB),
    "host_memory_gib": ("host_memory_bytes", GIB),
    "memory_bandwidth_gbs": ("memory_bandwidth", 1e9),
    "bandwidth_gbs": ("bandwidth", 1e9),
    "latency_us": ("latency_s", 1e-6),
    "bulk_latency_us": ("bulk_latency_s", 1e-6),
    "tflops": ("flops", 1e12),
    "matmul_tflops": ("matmul", 1e12),
}
"""TOML key -> field of the class and the factor that converts the TOML unit into the unit of the field."""
_KINDS: dict[str, type[Any]] = {"devices": Device, "links": Link, "nodes": NodeType}
_REFERENCES = {"device": "devices", "inside": "links", "nic": "links", "host_link": "links"}
"""Keys of a node that refer to an entry of another section -> that section."""


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)


def _is_list(given: Any, kind: type) -> bool:
    return isinstance(given, list) and all(type(item) is kind for item in given)


def _is_rates(given: Any) -> bool:
    return isinstance(given, dict) and all(dtype in DTYPES and _is_number(rate) for dtype, rate in given.items())


_Form = tuple[str, "Callable[[Any], bool]"]
_TEXT: _Form = ("a string", lambda given: isinstance(given, str))
_NUMBER: _Form = ("a number", _is_number)
_WHOLE: _Form = ("an integer", lambda given: type(given) is int)
_FLAG: _Form = ("true or false", lambda given: isinstance(given, bool))
_CATALOGUE_FORMS: dict[str, _Form] = {
    **dict.fromkeys((*_UNITS, "efficiency"), _NUMBER),
    **dict.fromkeys(("tflops", "matmul_tflops"), (f"numbers by dtype ({', '.join(DTYPES)})", _is_rates)),
    **dict.fromkeys(("aliases", "driver_names"), ("a list of strings", lambda given: _is_list(given, str))),
    **dict.fromkeys(("num_devices", "nics", "host_cores"), _WHOLE),
    **dict.fromkeys(("multicast", "assumed"), _FLAG),
    "capability": ("a list of integers", lambda given: _is_list(given, int)),
    "kind": ('"cuda", "rocm" or "cpu"', lambda given: given in ("cuda", "rocm", "cpu")),
}
"""Key -> description of its valid values, and a function that checks a value. Other keys require a string."""
_SAME_SIZE = 0.05
"""Tolerance when devices are identified by memory size, because drivers reserve different amounts."""


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Devices and nodes by name or alias."""

    devices: Mapping[str, Device]
    nodes: Mapping[str, NodeType]

    def find(self, name: str) -> Device | NodeType:
        """Return the device or node with a name or alias, ignoring case; raises HardwareError with the nearest name."""
        entries: tuple[Device | NodeType, ...] = (*self.devices.values(), *self.nodes.values())
        names = {_normalized(alias): entry for entry in entries for alias in (entry.name, *entry.aliases)}
        if _normalized(name) not in names:
            count = re.fullmatch(r"(\d+)[ *-]*(\D.*)", name)
            if count and _normalized(count[2]) in names:  # 8H100
                fix = f"write {count[1]}x{count[2]}"
                raise HardwareError(f"cluster {name!r} has no x", code="hardware.cluster-syntax", fix=fix)
            close = difflib.get_close_matches(_normalized(name), names, n=1)
            # All names would fill a screen, and most users look for a device.
            fix = f"{nearest(close[0] if close else name, close or self.devices)} (this machine: 'this' or '2xthis')"
            raise HardwareError(f"device or node {name!r} is unknown", code="hardware.unknown-device", fix=fix)
        return names[_normalized(name)]

    def node_of(self, device: Device) -> NodeType:
        """Return the default node type of a device."""
        if device.node not in self.nodes:
            fact = f"device {device.name} refers to node {device.node!r}, which is not in the catalogue"
            raise HardwareError(fact, code="hardware.catalogue-unknown-reference", fix=nearest(device.node, self.nodes))
        return replace(self.nodes[device.node], device=device)

    def identify(self, gpu: Gpu) -> Device:
        """Return the catalogue's device that matches the name and memory size that the driver reports for a GPU.

        An unknown GPU gets the rates of the most similar device, and its `assumed` is true.
        """
        for device in self.devices.values():
            names = map(_normalized, (*device.driver_names, device.name, *device.aliases))
            size_difference = abs(device.memory_bytes / gpu.memory_bytes - 1)
            if _normalized(gpu.name) in names and size_difference < _SAME_SIZE:
                return device
        candidates = [device for device in self.devices.values() if device.kind == "cuda"]
        similar = min(candidates, key=lambda device: _difference(device, gpu))
        return replace(
            similar,
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            aliases=(),
            driver_names=(gpu.name,),
            assumed=True,
            source=f"memory: the driver; rates: assumption, as {similar.name}",
        )


def read_catalogue(extra: Path | None = None, user: Path | None = None) -> Catalogue:
    """Return the built-in catalogue, overridden by the user's and by `extra`.

    The user's catalogue is ~/.config/shardwise/hardware.toml, which need not exist.
    """
    user = user or config_directory() / "hardware.toml"
    files = [_BUILT_IN]
    if user.exists():
        files.append(user)
    if extra:
        files.append(extra)
    tables: dict[str, dict[str, tuple[Path, dict[str, Any]]]] = {section: {} for section in _KINDS}
    for file in files:
        for section, entries in _load(file).items():
            tables[section] |= {name: (file, table) for name, table in entries.items()}
    built: dict[str, dict[str, Any]] = {}
    for section in ("devices", "links", "nodes"):  # nodes last: they refer to the others
        built[section] = {name: _build(section, name, *entry, built) for name, entry in tables[section].items()}
    catalogue = Catalogue(devices=built["devices"], nodes=built["nodes"])
    _check_names_unique((*catalogue.devices.values(), *catalogue.nodes.values()))
    return catalogue


def _load(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        data = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(
            f"catalogue {file} cannot be read ({error})", code="hardware.catalogue-read-failed", fix="pass a .toml file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(
            f"{file.name} is not valid TOML ({error})", code="hardware.catalogue-not-toml", fix="correct the syntax"
        ) from None
    for section, entries in data.items():
        if section not in _KINDS:
            raise HardwareError(
                f"{file.name} has an unknown section {section!r}",
                code="hardware.catalogue-unknown-section",
                fix=nearest(section, _KINDS),
            )
        if not isinstance(entries, dict) or not all(isinstance(table, dict) for table in entries.values()):
            raise HardwareError(
                f"{file.name}: {section} must be a table of tables",
                code="hardware.catalogue-not-tables",
                fix=f"write [{section}.NAME]",
            )
    return data


def _build(section: str, name: str, file: Path, table: dict[str, Any], built: dict[str, dict[str, Any]]) -> Any:
    """Return the Device, Link or NodeType of a TOML table; raises HardwareError for unknown and missing keys."""
    kind, where = _KINDS[section], f"{file.name}: {section}.{name}"
    keys = {key: field for key, (field, _) in _UNITS.items()}
    known = {part.name: part for part in fields(kind)}
    written = {field: key for key, field in keys.items()}
    shown = {written.get(part, part) for part in known} - {"name"}
    values: dict[str, Any] = {"name": name}
    for key, given in table.items():
        if key not in shown:
            raise HardwareError(
                f"{where} has an unknown key {key!r}", code="hardware.catalogue-unknown-key", fix=nearest(key, shown)
            )
        if section == "nodes" and key in _REFERENCES:
            others = built[_REFERENCES[key]]
            if given not in others:
                raise HardwareError(
                    f"{where} refers to an unknown {key} {given!r}",
                    code="hardware.catalogue-unknown-reference",
                    fix=nearest(str(given), others),
                )
            values[key] = others[given]
        else:
            values[keys.get(key, key)] = _value(where, key, given)
    required = {part.name for part in known.values() if part.default is MISSING and part.default_factory is MISSING}
    missing = sorted(key for key in shown if keys.get(key, key) in required - set(values))
    if missing:
        raise HardwareError(
            f"{where} requires {missing[0]}", code="hardware.catalogue-key-missing", fix=f"add {', '.join(missing)}"
        )
    return kind(**values)


def _value(where: str, key: str, given: Any) -> Any:
    """Check the value of a key and return it in the unit of its field."""
    requirement, is_valid = _CATALOGUE_FORMS.get(key, _TEXT)
    if not is_valid(given):
        raise HardwareError(
            f"{where}.{key} must be {requirement}, got {given!r}",
            code="hardware.catalogue-value-invalid",
            fix=f"set {key} to {requirement}",
        )
    field, unit = _UNITS.get(key, (key, 1))
    if isinstance(given, dict):
        return {dtype: rate * unit for dtype, rate in given.items()}
    if isinstance(given, list):
        return tuple(given)
    if key not in _UNITS:
        return given
    return int(given * unit) if field.endswith("bytes") else given * unit


def _check_names_unique(entries: Iterable[Device | NodeType]) -> None:
    owners: dict[str, str] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            owner = owners.setdefault(_normalized(name), entry.name)
            if owner != entry.name:
                raise HardwareError(
                    f"{owner} and {entry.name} have the same name or alias {name!r}",
                    code="hardware.catalogue-name-repeated",
                    fix=f"rename {owner} or {entry.name}, or remove the alias",
                )


def _normalized(name: str) -> str:
    """Return a name in lower case, with dashes in place of spaces and underscores."""
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def _difference(device: Device, gpu: Gpu) -> tuple[bool, bool, float]:
    """Return a sort key for similarity: compute capability first, then its major version, then memory size."""
    same = device.capability == gpu.compute_capability
    generation = device.capability[:1] == gpu.compute_capability[:1]
    return (not same, not generation, abs(device.memory_bytes - gpu.memory_bytes))
