"""The command line and the public Python names, as they are found in this tree."""

import inspect

import click

import shardwise as sw
from goldens.entry import cli


def command_line():
    """Return the arguments and options of every command, with their defaults and choices."""
    context = click.Context(cli)
    found = {}
    for verb in cli.list_commands(context):
        command = cli.get_command(context, verb)
        found[verb] = _parameters(command)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found[f"{verb} {name}"] = _parameters(command.get_command(context, name))
    return found


def _parameters(command):
    return [_described(parameter) for parameter in command.params]


def _described(parameter):
    """Return a parameter in one line: names, type, default, whether it may be repeated."""
    options = isinstance(parameter, click.Option)
    name = "/".join(parameter.opts) if options else (parameter.name or "").upper()
    parts = [name, _kind(parameter.type)]
    if options and parameter.is_flag:
        parts = [name, "flag"]
    if isinstance(parameter.default, str | int | float) and not isinstance(parameter.default, bool):
        parts.append(f"default {parameter.default}")
    if getattr(parameter, "multiple", False) or parameter.nargs == -1:
        parts.append("repeated")
    if parameter.required:
        parts.append("required")
    return ", ".join(parts)


def _kind(kind):
    if isinstance(kind, click.Choice):
        return "one of " + " ".join(str(choice) for choice in kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        return f"{kind.name} from {kind.min} to {kind.max}"
    return kind.name


def public_names():
    """Return what `shardwise` offers in Python: each name with its parameters, or the names inside a module."""
    return {name: _offered(getattr(sw, name)) for name in sw.__all__}


def _offered(value):
    if inspect.ismodule(value) and not callable(value):
        return "module: " + " ".join(sorted(_names(value)))
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return "value"
    return f"({', '.join(parameters)})"


def _names(module):
    """Return the names of a module that are public and its package's own."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return listed
    own = module.__name__
    return [name for name, value in vars(module).items() if not name.startswith("_") and _is_from(value, own)]


def _is_from(value, module_name):
    return isinstance(value, sw.Loss | sw.Metric) or getattr(value, "__module__", "").startswith(module_name)
