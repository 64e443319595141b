"""Find stale claims in pages: names of files, options, public attributes, fields, targets and codes that do not exist.

`stale(text, page)` returns a sentence for each claim that the code contradicts. What is checked stands in backquotes
or in a fenced block of commands; prose is not read.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from functools import cache
from pathlib import Path

import click

import shardwise
from error_codes import errors_by_code
from reference import commands
from shardwise.cli.main import VERBS
from shardwise.planner.settle import set_keys
from shardwise.plans import Plan

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shardwise"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FOLDERS = ("benchmarks", "docs", "examples", "scripts", "src", "tests")
INLINE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
PATH = re.compile(r"(?<![\w./-])((?:[\w.-]+/)+[\w.-]*\w\.(?:py|md|toml|sh|json|svg|png|txt))(?![\w/])")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*+(?<![-_])")
PUBLIC = re.compile(r"(?<![\w.])sw((?:\.[A-Za-z_]\w*)+)")
MODULE = re.compile(r"(?<![\w./])shardwise((?:\.[a-z_]\w*)+)")
FIELD = re.compile(r"(?<![\w.])((?:Job|Plan|Layout|Lora|Loss|Metric|World)\.[a-z_]\w*)")
CODE = re.compile(r"[a-z]+\.[a-z0-9]+(?:-[a-z0-9]+)+")
VERB = re.compile(r"(?:^|[;&(] *|\s)shardwise ([a-z]+)(?: ([a-z0-9]+))?(?=\s|$)", re.MULTILINE)
TARGET = re.compile(r"(?:^|&& )make ([a-z-]+)", re.MULTILINE)
SET = re.compile(r"--set[ =]([a-z_.]+)=")
SECTIONS = tuple(
    field.name
    for field in dataclasses.fields(Plan)
    if field.name in {"precision", "offload", "communication", "pipeline"}
)
FOREIGN = """
--constraint --editable --randomly-seed --requirement
--nodes --ntasks --ntasks-per-node --gpus --gpus-per-node --gpus-per-task --gpu-bind --cpus-per-task --no-kill --pty
--allow-run-as-root --bind-to --oversubscribe
--trace --num_gpus --deepspeed_config --hostfile
"""
"""Options of pip and pytest, of SLURM, of mpirun, of Nsight Systems and DeepSpeed."""


def stale(text, page):
    """Return what a page claims and the code does not have."""
    fenced = FENCE.findall(text)
    inline = [match[1].strip() for match in INLINE.findall(FENCE.sub("", text))]
    shell = [body for language, body in fenced if language == "bash"]
    python = [body for language, body in fenced if language == "python"]
    found = []
    for part in (*inline, *shell):
        found += _stale_paths(part, page) + _stale_options(part) + _stale_commands(part)
    for part in (*inline, *python):
        found += _stale_names(part)
    for part in inline:
        found += _stale_codes(part)
    return sorted(set(found))


def _stale_paths(part, page):
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    found = []
    for path in PATH.findall(part):
        first = path.split("/")[0]
        if first in {*FOLDERS, *packages, "..", "."}:
            places = (ROOT, SOURCE, page.parent, ROOT / "examples", ROOT / "tests")
            if not any((place / path).exists() for place in places):
                found.append(f"file {path} does not exist")
    return found


def _stale_options(part):
    return [f"option {name} does not exist" for name in OPTION.findall(part) if not _is_option(name)]


def _is_option(name):
    return name.replace("_", "-") in _options() or name in FOREIGN.split() or name in _script_options()


@cache
def _options():
    names = {"--help", "--debug", "--version"}
    for _, command in commands():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                names |= set(parameter.opts)
    return names


@cache
def _script_options():
    """Return the options of the scripts in the repository, as argparse gets them."""
    names = set()
    for folder in ("examples", "benchmarks", "scripts"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in {".py", ".sh"} and path.name != "claims.py":
                names |= set(re.findall(r"[\"'\s(](--[a-z][a-z0-9_-]*[a-z0-9])", path.read_text()))
    return names


@cache
def _surface():
    """Return the paths of all commands, the targets of make, and the keys of --set."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return {path for path, _ in commands()}, targets, set(set_keys())


def _parameters(part):
    """Return the hyperparameters of the job files that a part of a page names: the parameters of their function job."""
    found = set()
    for path in re.findall(r"[\w/.-]+\.py", part):
        if (ROOT / path).is_file():
            for parameters in re.findall(r"^def job\((.*?)\)", (ROOT / path).read_text(), re.MULTILINE | re.DOTALL):
                found |= set(re.findall(r"(\w+):", parameters))
    return found


def _stale_commands(part):
    found = []
    paths, targets, keys = _surface()
    groups = {path[0] for path in paths if len(path) > 1}
    for verb, name in VERB.findall(part):
        if verb not in VERBS:
            found.append(f"command shardwise {verb} does not exist")
        elif verb in groups and name and (verb, name) not in paths:
            found.append(f"command shardwise {verb} {name} does not exist")
    found += [f"target make {target} does not exist" for target in TARGET.findall(part) if target not in targets]
    for key in SET.findall(part):
        if key not in keys | _parameters(part) and not any(name.startswith(f"{key}.") for name in keys):
            found.append(f"key --set {key} does not exist")
    return found


def _stale_names(part):
    names = [name for name in PUBLIC.findall(part) if not name.isupper()]  # sw.NAME stands for any
    found = [f"sw{name} does not exist" for name in names if not _resolves(name)]
    found += [f"{name} does not exist" for name in FIELD.findall(part) if not _resolves(f".{name}")]
    inner = {path.stem for path in SOURCE.iterdir()}
    modules = [name for name in MODULE.findall(part) if name.split(".")[1] in inner]
    return found + [f"shardwise{name} does not exist" for name in modules if not _imports(name)]


@cache
def _resolves(name):
    value = shardwise
    for part in name.split(".")[1:]:
        if not hasattr(value, part):
            fields = getattr(value, "__dataclass_fields__", {})
            return part in fields
        value = getattr(value, part)
    return True


@cache
def _imports(name):
    parts = name.split(".")[1:]
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(["shardwise", *parts[:count]]))
        except ImportError:
            continue
        return all(hasattr(value, part) for part in parts[count:][:1])
    return _resolves(name)


def _stale_codes(part):
    found = []
    areas = {code.partition(".")[0] for code in errors_by_code()}
    if CODE.fullmatch(part) and part.partition(".")[0] in areas and part not in errors_by_code():
        found.append(f"error code {part} does not exist")
    section, _, field = part.partition("=")[0].strip().partition(".")
    if section in SECTIONS and re.fullmatch(r"[a-z_]+", field) and not _resolves_plan(section, field):
        found.append(f"Plan field {section}.{field} does not exist")
    return found


def _resolves_plan(section, field):
    return field in {part.name for part in dataclasses.fields(getattr(Plan(), section))}
