"""What every command writes with --json: keys and types of all, and the values of those that measure nothing."""

import json
import math
from pathlib import Path

from goldens.entry import command

TINY = Path(__file__).resolve().parent / "tiny.py"
PLANS = {
    "llama-7b on 8xH100": ("llama-7b", "--cluster", "8xH100"),
    "llama3-70b on 4x8xH100": ("llama3-70b", "--cluster", "4x8xH100"),
    "gpt2-xl on 2xp4d.24xlarge": ("gpt2-xl", "--cluster", "2xp4d.24xlarge", "--batch-size", "512"),
    "llama-7b by LoRA on 2xA100-40GB": ("llama-7b", "--cluster", "2xA100-40GB", "--lora", "8"),
    "llama-7b on 1xT4": ("llama-7b", "--cluster", "1xT4", "--batch-size", "1", "--length", "128"),
    "llama-7b by DeepSpeed": ("llama-7b", "--cluster", "8xA100-40GB", "--engine", "deepspeed"),
    "tiny job on 4xA100-40GB": (TINY, "--cluster", "4xA100-40GB"),
}
"""What is planned: published models and a job, and one that fits nowhere."""
QUICK = {
    "verify": ("verify", TINY, "--plans", "ddp,zero3", "--nproc", "2", "--steps", "2"),
    "doctor": ("doctor",),
    "doctor env": ("doctor", "env", "--preset", "gcp"),
    "bench step in a fake world": (
        *("bench", "step", TINY, "--plan", "zero3", "--fake-world", "4", "--steps", "2", "--device", "cpu"),
    ),
}
"""Commands whose keys and types `make test` compares."""
WHOLE = {
    "verify --resume": ("verify", TINY, "--plans", "zero3", "--nproc", "2", "--resume"),
    "bench step": ("bench", "step", TINY, "--plan", "zero3", "--nproc", "2", "--steps", "2", "--device", "cpu"),
    "bench step --profile": (
        *("bench", "step", TINY, "--plan", "ddp", "--nproc", "1", "--steps", "2", "--device", "cpu", "--profile"),
    ),
    "bench comm": ("bench", "comm", "all_reduce", "--nproc", "2", "--sizes", "1K", "--seconds", "0.1"),
    "bench p2p": ("bench", "p2p", "--nproc", "2", "--seconds", "0.02", "--size", "64K", "--device", "cpu"),
    "bench overlap": (
        *("bench", "overlap", TINY, "--plan", "ddp", "--nproc", "2", "--buckets", "1,25", "--rounds", "1"),
        *("--device", "cpu"),
    ),
    "bench scaling": ("bench", "scaling", "--ranks", "1,2", "--rounds", "1", "--device", "cpu"),
    "doctor drill": ("doctor", "drill", "--drill", "kill", "--steps", "10", "--nproc", "2"),
    "doctor net": ("doctor", "net", "--hosts", "localhost"),
}
"""Commands that measure, or that start ranks as processes: `make prove` compares their keys and types."""
LAST_ARGUMENT = {"bench scaling": TINY, "doctor drill": TINY}
"""Arguments of commands that take no option after them."""
MAPS = ("facts.facts", "facts.lookups.*", "facts.clocks", "facts.road.addresses", "forward", "reverse")
"""How paths end of objects whose keys are names of this machine."""


def output_of(name, arguments):
    """Run a command with --json and return its exit code and what it wrote."""
    last = (LAST_ARGUMENT[name],) if name in LAST_ARGUMENT else ()
    code, text = command(*arguments, "--json", *last)
    assert text, f"{name} wrote nothing and ended with {code}"
    return code, json.loads(text)


def plan_output(arguments):
    """Plan, and return exit code and answer; sentences are left out, since only numbers and names are promised."""
    code, answer = output_of("plan", ("plan", *arguments))
    return {"exit code": code, "answer": without_sentences(answer)}


def without_sentences(value):
    """Return a JSON value with every text that has a space replaced: its wording may change."""
    if isinstance(value, dict):
        return {key: without_sentences(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_sentences(part) for part in value]
    return "(text)" if isinstance(value, str) and " " in value else value


def value_differences(found, golden, path=""):
    """Return where two JSON values differ; numbers may differ by 1e-9 of their size."""
    if isinstance(found, dict) and isinstance(golden, dict):
        differences = [f"{path}.{key}: only in one" for key in sorted(found.keys() ^ golden.keys())]
        for key in golden.keys() & found.keys():
            differences += value_differences(found[key], golden[key], f"{path}.{key}")
        return differences
    if isinstance(found, list) and isinstance(golden, list) and len(found) == len(golden):
        differences = []
        for index, (part, recorded) in enumerate(zip(found, golden, strict=True)):
            differences += value_differences(part, recorded, f"{path}[{index}]")
        return differences
    if _is_number(found) and _is_number(golden):
        return [] if math.isclose(found, golden, rel_tol=1e-9) else [f"{path}: {found!r}, recorded {golden!r}"]
    return [] if found == golden else [f"{path}: {found!r}, recorded {golden!r}"]


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def schema(value, path=""):
    """Return keys and types: objects by key ("*" where keys are names of this machine), lists by their entries."""
    if isinstance(value, dict):
        parts = {key: schema(part, f"{path}.{key}") for key, part in value.items()}
        return {"*": _merged(list(parts.values()))} if path.endswith(MAPS) else parts
    if isinstance(value, list):
        return [_merged([schema(part, f"{path}.*") for part in value])] if value else []
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, int | float) else "text"


def _merged(schemas):
    """Return one schema for all entries of a list: keys that some entries lack end in "?"."""
    kinds = [each for each in schemas if each not in ("null", [])]
    if not kinds:
        return schemas[0] if schemas else "null"
    if all(isinstance(each, dict) for each in kinds):
        names = list(dict.fromkeys(key.removesuffix("?") for each in kinds for key in each))
        return {_key(name, kinds): _merged(_values(name, kinds)) for name in names}
    if all(isinstance(each, list) for each in kinds):
        return [_merged([part for each in kinds for part in each])]
    return "|".join(sorted({str(each) for each in kinds}))


def _values(name, kinds):
    return [each[key] for each in kinds for key in (name, f"{name}?") if key in each]


def _key(name, kinds):
    return name if all(name in each for each in kinds) else f"{name}?"


def schema_differences(found, golden, path=""):
    """Return where keys or types differ; null and an empty list go with everything, since machines differ."""
    unknown = ("null", [])
    if found in unknown or golden in unknown:
        return []
    if isinstance(found, dict) and isinstance(golden, dict):
        needed = {key for key in golden if not key.endswith("?")}
        known = {key.removesuffix("?"): part for key, part in golden.items()}
        given = {key.removesuffix("?"): part for key, part in found.items()}
        differences = [f"{path}.{key}: missing" for key in sorted(needed - given.keys())]
        differences += [f"{path}.{key}: not recorded" for key in sorted(given.keys() - known.keys())]
        for key in given.keys() & known.keys():
            differences += schema_differences(given[key], known[key], f"{path}.{key}")
        return differences
    if isinstance(found, list) and isinstance(golden, list):
        return schema_differences(found[0], golden[0], f"{path}[]")
    if isinstance(found, str) and isinstance(golden, str):
        missing = set(found.split("|")) - set(golden.split("|"))
        return [f"{path}: {found}, recorded {golden}"] if missing else []
    return [f"{path}: {found}, recorded {golden}"]
