"""Where goldens are kept, how they are written, and how close a value must come to a recorded one."""

import json
import math
import platform
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

DATA = Path(__file__).resolve().parent / "data"
RECORDED_WITH = {"torch": "2.13", "transformers": "5.22"}
"""Versions that computed the values; what any version gives (names, formats, sample orders) is always compared."""
LOSS_TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
WEIGHT_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3}
"""Relative to the norm. AVX2 and AVX-512 differ by 1e-16 in fp64 losses; in fp32, Adam makes steps of full size from
gradients that are nothing but rounding."""


def load(name):
    """Return the golden of this name."""
    return json.loads((DATA / f"{name}.json").read_text())


def save(name, value):
    """Write a golden: one line for each innermost list or object, so that a difference is readable."""
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.json").write_text(_text(value, "") + "\n")


def _text(value, indent):
    if not isinstance(value, dict) or not any(isinstance(part, dict | list) for part in value.values()):
        return json.dumps(value)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(key)}: {_text(part, inner)}" for key, part in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def needs_recorded_versions():
    """Skip a comparison of computed values where torch, a model library or the CPU is another than when recorded."""
    torch_version = torch.__version__.partition("+")[0]
    if not torch_version.startswith(RECORDED_WITH["torch"]):
        pytest.skip(f"the values were recorded with torch {RECORDED_WITH['torch']}, this is {torch_version}")
    if not version("transformers").startswith(RECORDED_WITH["transformers"]):
        pytest.skip(f"the values were recorded with transformers {RECORDED_WITH['transformers']}")
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() != "x86_64" or capability not in {"AVX2", "AVX512"}:
        pytest.skip(f"torch draws normal numbers with other last bits on {platform.machine()} with {capability}")


def rounded(value, digits):
    """Return a JSON value with all floats rounded to significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part, digits) for part in value]
    return value


def training_differences(found, golden):
    """Return what differs between two trainings: losses, names, shapes or checksums of weights."""
    precision = golden["precision"]
    differences = []
    if len(found["losses"]) != len(golden["losses"]):
        differences.append(f"{len(found['losses'])} losses, recorded {len(golden['losses'])}")
    for step, (loss, recorded) in enumerate(zip(found["losses"], golden["losses"], strict=False)):
        if not math.isclose(loss, recorded, rel_tol=LOSS_TOLERANCE[precision]):
            differences.append(f"loss of step {step}: {loss!r}, recorded {recorded!r}")
    return differences + weight_differences(found["weights"], golden["weights"], WEIGHT_TOLERANCE[precision])


def weight_differences(found, golden, tolerance):
    """Return what differs between two sets of checksums, [shape, sum, norm] by name."""
    differences = [f"{name}: missing" for name in golden if name not in found]
    differences += [f"{name}: not recorded" for name in found if name not in golden]
    for name in golden.keys() & found.keys():
        shape, total, norm = found[name]
        recorded_shape, recorded_total, recorded_norm = golden[name]
        if shape != recorded_shape:
            differences.append(f"{name}: shape {shape}, recorded {recorded_shape}")
            continue
        allowed = tolerance * recorded_norm + 1e-12  # a key bias has no gradient but rounding
        if abs(norm - recorded_norm) > allowed:
            differences.append(f"{name}: norm {norm!r}, recorded {recorded_norm!r}")
        if abs(total - recorded_total) > allowed * math.sqrt(math.prod(shape)):
            differences.append(f"{name}: sum {total!r}, recorded {recorded_total!r}")
    return differences
