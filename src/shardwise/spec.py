"""Specs and Reports: the frozen input and output of every command.

A Spec contains all options of a command. Each field has its default in the class and its help in the docstring below
it. The options of the command line (`cli/main.py`), the signature of the Python function (`spec_function`) and the
JSON that ranks receive are all generated from these fields. Sections (`nodes`, `hang`, `save` ...) are Specs inside a
Spec, shared by commands, and their fields are options too: `--save-every 100`, `save_every=100`.

Invariant: a Spec is always valid. Values are converted and validated at construction, whether they come from the
command line, from Python or from JSON.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import keyword
import operator
import re
import textwrap
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import msgspec

from shardwise.errors import InputError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Option:
    """Command-line form of a field that is not a plain option --field-name; part of the field's `Annotated`."""

    flags: tuple[str, ...] = ()
    """Flags in place of --field-name; the first one, with underscores, is the parameter name in Python."""
    metavar: str | None = None
    positional: bool = False
    """Whether the field is a positional argument, on the command line and in Python."""
    bare: str | None = None
    """The value of a flag without an argument; None if an argument is required."""


def option(*flags: str, metavar: str | None = None) -> Option:
    """Return an Option with flags and metavar."""
    return Option(flags=flags, metavar=metavar)


def argument(metavar: str) -> Option:
    """Return the Option of a positional argument."""
    return Option(metavar=metavar, positional=True)


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the options of a command: frozen, validated and convertible to and from JSON."""

    def __post_init__(self) -> None:
        """Validate each value and convert it if necessary, such as a list to a tuple or a string to a Path."""
        for name, hint in _hints(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, Spec):
                continue
            try:
                converted = msgspec.convert(value, hint, dec_hook=_convert_path)
            except msgspec.ValidationError as error:
                raise InputError(
                    f"{type(self).__name__}.{name} has an invalid value, {value!r}",
                    code="spec.value-invalid",
                    fix=_requirement(hint, error),
                ) from None
            msgspec.structs.force_setattr(self, name, converted)

    @classmethod
    def of(cls, *arguments: Any, **options: Any) -> Self:
        """Create a Spec from positional arguments and flat options; fields of nested sections have no prefix."""
        fields = flat_fields(cls)
        aliases = option_names(cls)
        positional = [name for name, field in fields.items() if field.option.positional]
        if len(arguments) > len(positional):
            raise InputError(
                f"{cls.__name__} accepts {len(positional)} positional arguments ({', '.join(positional) or 'none'}),"
                f" got {len(arguments)}",
                code="spec.too-many-arguments",
                fix="pass the remaining arguments by name",
            )
        named = {**dict(zip(positional, arguments, strict=False)), **options}
        own: dict[str, Any] = {}
        for name, value in named.items():
            if name not in aliases:
                raise InputError(
                    f"{cls.__name__} has no option {name!r}", code="spec.unknown-option", fix=nearest(name, aliases)
                )
            field = fields[aliases[name]]
            if field.section is None:
                own[field.name] = value
            else:
                section = own.get(field.section, field.section_default)
                own[field.section] = msgspec.structs.replace(section, **{field.name: value})
        return cls(**own)

    def to_json(self) -> str:
        """Return the Spec as a single line of JSON."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the Spec from the JSON that `to_json` returned."""
        return msgspec.json.decode(text, type=cls, dec_hook=_convert_path)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some values replaced."""
        return msgspec.structs.replace(self, **changes)

    def to_argv(self) -> tuple[list[str], list[str]]:
        """Return the options that differ from their defaults, and the positional arguments, for a command line."""
        options, arguments = list[str](), list[str]()
        for name, field in flat_fields(type(self)).items():
            value = getattr(getattr(self, field.section) if field.section else self, field.name)
            values = value if isinstance(value, tuple) else (value,)
            flag = max(field.option.flags, key=len, default=f"--{name.replace('_', '-')}")
            if field.option.positional:
                arguments += map(str, values)
            elif isinstance(value, bool):
                options += [switch_flag(field, flag)] if value != field.default else []
            elif value != field.default:
                options += [f"{flag}={each}" for each in values]
        return options, arguments


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of the result of a command: its values, their text and the exit code."""

    exit_code: int = 0

    def to_json(self) -> str:
        """Return the values as indented JSON, without the exit code."""
        values = msgspec.to_builtins(self, enc_hook=str)
        del values["exit_code"]
        return msgspec.json.format(msgspec.json.encode(values), indent=1).decode()

    def to_text(self) -> str:
        """Return the text for standard output."""
        raise NotImplementedError

    def note(self) -> str:
        """Return the text for standard error, such as the cause of a failure or how to continue; empty by default."""
        return ""


@dataclass(frozen=True, kw_only=True)
class FlatField:
    """An option of a Spec: a field of the Spec or of one of its sections."""

    name: str
    hint: Any
    """The type with its constraints."""
    default: Any
    """msgspec.NODEFAULT if the option is required."""
    help: str
    option: Option
    section: str | None = None
    """Name of the section; None for a field of the Spec itself."""
    section_default: Any = None


@functools.cache
def flat_fields(kind: type[Spec]) -> dict[str, FlatField]:
    """Return the options of a Spec by their public names, in the order of the fields."""
    return {_public_name(field): field for field in _walk(kind, None, None)}


@functools.cache
def option_names(kind: type[Spec]) -> dict[str, str]:
    """Return accepted name -> public name: each long flag, and the public name itself."""
    names = {}
    for name, field in flat_fields(kind).items():
        for alias in (name, *_long_names(field)):
            names[alias] = name
    return names


def _public_name(field: FlatField) -> str:
    name = next(iter(_long_names(field)), field.name)
    return field.name if keyword.iskeyword(name) else name  # --async


def switch_flag(field: FlatField, flag: str) -> str:
    """Return the flag that changes a boolean option from its default: --no-FLAG if it is on by default."""
    return f"--no-{flag.removeprefix('--')}" if field.default is True else flag


def _long_names(field: FlatField) -> list[str]:
    flags = [flag for flag in field.option.flags if flag.startswith("--")]
    return [flag.removeprefix("--").replace("-", "_") for flag in flags]


def _walk(kind: type[Spec], section: str | None, section_default: Any) -> list[FlatField]:
    found = []
    docs = _field_docs(kind)
    hints = _hints(kind)
    for field in msgspec.structs.fields(kind):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if section_default is not None:
            default = getattr(section_default, field.name)
        if isinstance(default, Spec):
            found += _walk(type(default), field.name, default)
            continue
        marks = [mark for mark in typing.get_args(hints[field.name])[1:] if isinstance(mark, Option)]
        found.append(
            FlatField(
                name=field.name,
                hint=hints[field.name],
                default=default,
                help=docs.get(field.name, ""),
                option=marks[0] if marks else Option(),
                section=section,
                section_default=section_default,
            )
        )
    return found


@functools.cache
def _hints(kind: type[Spec]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


def _field_docs(kind: type[Spec]) -> dict[str, str]:
    """Return the docstring below each field as a single line, including those of base classes."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if owner is Spec or not issubclass(owner, Spec):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        for field, below in itertools.pairwise(body):
            is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if is_field and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def _requirement(hint: Any, error: msgspec.ValidationError) -> str:
    """Return the fix for an invalid value: the choices of a Literal, or the type that msgspec expected."""
    choices = typing.get_args(plain_type(hint))
    if typing.get_origin(plain_type(hint)) is typing.Literal:
        return f"choose one of {', '.join(map(str, choices))}"
    return f"pass a value of type {str(error).removeprefix('Expected ').partition(', got ')[0]}"


def plain_type(hint: Any) -> Any:
    """Return a type without the constraints and options of its Annotated."""
    while typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(plain_type, typing.get_args(hint)))
    return hint


def _convert_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return local_path(value)
    raise TypeError(f"Expected `{kind.__name__}`, got {value!r}")


_REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""A URL, or what is left of it in a Path, which has lost a slash."""


def is_url(text: str | None) -> bool:
    """Return whether a text is a URL, such as s3://bucket/run; a URL of a local file is one too."""
    return text is not None and re.match(r"[A-Za-z][A-Za-z0-9+.:-]*://", text) is not None


def local_path(path: Path | str) -> Path:
    """Return a path, or raise InputError for a URL of object storage, of which Path would make a relative path."""
    found = _REMOTE.match(str(path))
    if found is None:
        return Path(path)
    raise InputError(
        f"a local path is required, got a URL of {found[1]}://",
        code="spec.path-is-url",
        fix="download a checkpoint with train --resume URL, or copy the files, such as with aws s3 cp --recursive",
    )


SpecT = TypeVar("SpecT", bound=Spec)
ResultT = TypeVar("ResultT")


def spec_function(kind: type[SpecT]) -> Callable[[Callable[[SpecT], ResultT]], Callable[..., ResultT]]:
    """Decorate a function of a Spec so that it also accepts the options of the Spec as its parameters."""

    def wrap(function: Callable[[SpecT], ResultT]) -> Callable[..., ResultT]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> ResultT:
            if len(arguments) == 1 and isinstance(arguments[0], kind) and not options:
                return function(arguments[0])
            return function(kind.of(*arguments, **options))

        call.__signature__ = signature_of(kind, inspect.signature(function).return_annotation)  # type: ignore[attr-defined]
        return call

    return wrap


def signature_of(kind: type[Spec], returns: Any = inspect.Signature.empty) -> inspect.Signature:
    """Return the signature of a function whose parameters are the options of a Spec."""
    parameters = []
    for name, field in flat_fields(kind).items():
        default = inspect.Parameter.empty if field.default is msgspec.NODEFAULT else field.default
        kind_of = inspect.Parameter.POSITIONAL_OR_KEYWORD if field.option.positional else inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind_of, default=default, annotation=plain_type(field.hint)))
    return inspect.Signature(sorted(parameters, key=lambda each: each.kind), return_annotation=returns)
