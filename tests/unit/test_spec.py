"""A Spec is valid once it exists, and the same field makes the option, the parameter and the JSON key."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner

from refusals import refuses
from shardwise.cli.main import spec_options
from shardwise.spec import NonNegativeInt, PositiveInt, Spec, argument, option, spec_function


class SaveSection(Spec, frozen=True, kw_only=True):
    """When to save."""

    every: Annotated[NonNegativeInt, option("--save-every", metavar="STEPS")] = 0
    """Steps between
    checkpoints."""
    keep: str = "3"
    """How many stay."""


class RunSpec(Spec, frozen=True, kw_only=True):
    """What to run."""

    script: Annotated[str, argument("SCRIPT")]
    nproc: Annotated[PositiveInt | None, option("--nproc", "--nproc-per-node")] = None
    """Processes to start."""
    run_dir: Path | None = None
    settings: Annotated[tuple[str, ...], option("--set")] = ()
    on_hang: Literal["report", "stop"] = "report"
    save: SaveSection = SaveSection(keep="4")
    arguments: Annotated[tuple[str, ...], argument("ARGUMENTS")] = ()


@spec_function(RunSpec)
def run(spec: RunSpec) -> RunSpec:
    """Run a script."""
    return spec


@click.command("run")
@spec_options(RunSpec)
@click.option("--json", "as_json", is_flag=True)
def command(spec, *, as_json):
    """Run a script."""
    click.echo(f"{spec.to_json()} {as_json}")
    return 0


def test_the_command_line_and_python_give_one_spec():
    asked = ["--nproc-per-node", "2", "--set", "a=1", "--set", "b=2", "--save-every", "5", "--json", "t.py", "x"]
    shown = CliRunner().invoke(command, asked, standalone_mode=False).output
    spec = run("t.py", ("x",), nproc=2, set=["a=1", "b=2"], save_every=5)
    assert shown == f"{spec.to_json()} True\n"
    assert RunSpec.from_json(spec.to_json()) == spec == run(spec)
    assert spec.save == SaveSection(every=5, keep="4")


def test_a_function_shows_its_options_and_their_defaults():
    parameters = inspect.signature(run).parameters
    assert list(parameters) == ["script", "arguments", "nproc", "run_dir", "set", "on_hang", "save_every", "keep"]
    assert parameters["script"].default is inspect.Parameter.empty
    assert (parameters["keep"].default, parameters["nproc"].annotation) == ("4", int | None)


def test_help_comes_from_the_docstrings_below_the_fields():
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "--save-every STEPS" in shown
    assert "Steps between checkpoints." in shown
    assert "[default: 4]" in shown


def test_values_become_the_type_of_the_field():
    spec = run("t.py", run_dir="runs/a", set=["a=1"])
    assert (spec.run_dir, spec.settings) == (Path("runs/a"), ("a=1",))


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"nproc": 0}, "spec.value-invalid", ["nproc", "0"]),
        ({"nproc": "2"}, "spec.value-invalid", ["nproc", "'2'"]),
        ({"on_hang": "sleep"}, "spec.value-invalid", ["on_hang", "report, stop"]),
        ({"save_every": -1}, "spec.value-invalid", ["every", "-1"]),
        ({"save_evry": 1}, "spec.unknown-option", ["save_every"]),
    ],
)
def test_a_spec_that_cannot_be_right_is_refused_at_construction(options, code, values):
    with refuses(code, *values):
        run("t.py", **options)


def test_more_arguments_than_the_spec_has_are_refused():
    with refuses("spec.too-many-arguments", "3", "script, arguments"):
        run("t.py", ("x",), "y")
