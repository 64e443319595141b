"""The options of a command, made from the fields of its Spec: flags, types, defaults and help."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
import msgspec

from shardwise.runs.console import complain, say
from shardwise.spec import FlatField, Report, Spec, flat_fields, plain_type

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

SpecT = TypeVar("SpecT", bound=Spec)

WITH_UNDERSCORES: dict[str, Any] = {"token_normalize_func": lambda token: token.replace("_", "-")}
"""Context settings of commands that take --nproc_per_node for --nproc-per-node, as torchrun does."""


def takes(kind: type[SpecT], *, without: Collection[str] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command one option per field of a Spec, but for those named in `without`; it is called with the Spec.

    Options that only the command line has (`--json`) stand beside it as click options and arrive by name.
    """
    fields = {name: field for name, field in flat_fields(kind).items() if name not in without}

    def wrap(command: Callable[..., int]) -> Callable[..., int]:
        def call(**values: Any) -> int:
            asked = {name: values.pop(name) for name in fields}
            return command(kind.of(**asked), **values)

        call.__doc__ = command.__doc__
        call.__click_params__ = list(getattr(command, "__click_params__", ()))  # type: ignore[attr-defined]
        for name, field in reversed(fields.items()):
            call = _parameter(name, field)(call)
        return call

    return wrap


def present(report: Report, *, as_json: bool = False) -> int:
    """Show a report as text or as JSON, its note on standard error, and return the exit code of the command."""
    text = report.to_json() if as_json else report.to_text()
    if text:
        say(text)
    if report.note():
        complain(report.note())
    return report.exit_code


def _parameter(name: str, field: FlatField) -> Callable[[Callable[..., int]], Callable[..., int]]:
    if field.option.positional:
        variadic: dict[str, Any] = {"nargs": -1, "type": click.UNPROCESSED} if _is_tuple(field.hint) else {}
        required = field.default is msgspec.NODEFAULT
        return click.argument(name, metavar=field.option.metavar, required=required, **variadic)
    flags = field.option.flags or (f"--{name.replace('_', '-')}",)
    more = _value(field.hint)
    if field.default is msgspec.NODEFAULT:
        more["required"] = True
    elif not more.get("multiple"):
        more["default"] = field.default
        more["show_default"] = bool(field.default) and not more.get("is_flag")
    if field.option.bare is not None:
        more |= {"is_flag": False, "flag_value": field.option.bare}
    if field.section is not None:
        more["callback"] = lambda _context, _option, value: _checked(field, value)
    return click.option(*flags, name, metavar=field.option.metavar, help=field.help, **more)


def _checked(field: FlatField, value: Any) -> Any:
    """Check the value of a section at once: a script in its place would be reported as missing otherwise."""
    field.section_default.replace(**{field.name: value})
    return value


def _value(hint: Any) -> dict[str, Any]:
    """Return what click must know of a field's type."""
    kind, bounds = _unwrapped(hint)
    if kind is bool:
        return {"is_flag": True}
    if typing.get_origin(kind) is tuple:
        return {"multiple": True, **_value(typing.get_args(kind)[0])}
    return {"type": _click_type(kind, bounds)}


def _unwrapped(hint: Any) -> tuple[Any, msgspec.Meta | None]:
    """Return a type without None and Annotated, and the bounds that stood there."""
    bounds = None
    while typing.get_origin(hint) in (typing.Annotated, typing.Union, types.UnionType):
        hint, *marks = [part for part in typing.get_args(hint) if part is not type(None)]
        for mark in marks:
            if isinstance(mark, msgspec.Meta):
                bounds = mark
    return hint, bounds


def _click_type(kind: Any, bounds: msgspec.Meta | None) -> Any:
    if typing.get_origin(kind) is Literal:
        return click.Choice([str(choice) for choice in typing.get_args(kind)])
    if kind is Path:
        return click.Path(path_type=Path)
    if bounds is None:
        return kind
    if bounds.gt is not None:
        return click.FloatRange(min=bounds.gt, min_open=True, max=bounds.le)
    range_of: Any = click.IntRange if kind is int else click.FloatRange
    return range_of(min=bounds.ge, max=bounds.le)


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(plain_type(hint)) is tuple
