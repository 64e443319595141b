"""Descriptions of collectives: names, arguments that must be equal on every rank, and the source line of a call."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardwise.runs.calls import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType, FrameType


OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
"""Methods of torch's ProcessGroup in 2.11 and 2.13, mapped to the names of their public functions."""
POINT_TO_POINT = ("send", "recv", "recv_anysource")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCE = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""Reduce operations by their number in torch."""
_COMPARED: dict[str, Literal["all", "first", "second", "dtypes"]] = {
    "gather": "second",  # only the root has outputs
    "scatter": "first",  # only the root has inputs
    "all_gather": "first",  # the outputs have the inputs of every member, which may be uneven
    "reduce_scatter": "second",
    "all_to_all": "dtypes",  # members may exchange uneven splits
    "all_to_all_single": "dtypes",
}
_MOST_SHOWN = 4
_MOST_CODES = 64


def key_maker(method: str) -> Callable[[tuple[Any, ...], dict[str, Any], Mapping[str, Any]], tuple[Any, ...]]:
    """Return a function that maps the arguments of a collective to a key: shapes, dtypes, reduce operation, root.

    Its last argument contains the local variables of the caller if the caller is a torch function, and is empty
    otherwise. Reading the reduce operation from them takes 5 us instead of 15 us for unpacking it from the options
    (with cold caches).
    """
    name = OPERATIONS[method]
    reduces, has_root = name in _REDUCING, name in _ROOTED
    codes: dict[int, tuple[int, Any]] = {}

    def code_of(opts: Any, variables: Mapping[str, Any]) -> int:
        operation = variables.get("op")
        known = codes.get(id(operation)) if operation is not None else None
        if known is not None:
            return known[0]
        code = hash(opts.reduceOp)
        if operation is not None and len(codes) < _MOST_CODES:
            codes[id(operation)] = code, operation  # a reference, so that its address is not reused
        return code

    def key_of(args: tuple[Any, ...], kwargs: dict[str, Any], variables: Mapping[str, Any]) -> tuple[Any, ...]:
        if len(args) == 2 and type(args[0]) is list and len(args[0]) == 1:  # most calls have one tensor and options
            (tensor,), opts = args
            if type(opts).__name__[-7:] == "Options":
                code = code_of(opts, variables) if reduces else -1
                return method, tensor.shape, tensor.dtype, code, opts.rootRank if has_root else -1
        opts = kwargs.get("opts")
        if opts is None and args and type(args[-1]).__name__.endswith("Options"):
            *args, opts = args  # type: ignore[assignment]
        code = code_of(opts, variables) if reduces and opts is not None else -1
        root = opts.rootRank if has_root and opts is not None else -1
        return method, tuple([_shapes(value) for value in args]), None, code, root

    return key_of


def message_key(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a send or a receive: shapes, dtypes, peer and tag."""
    return method, *(_shapes(value) for value in args), *(_shapes(value) for value in kwargs.values())


def _shapes(value: Any) -> Any:
    """Return (shape, dtype) of a tensor, a tuple of these for a list of tensors, and other values unchanged."""
    kind = type(value)
    if kind is list or kind is tuple:
        return tuple([_shapes(item) for item in value])
    if hasattr(value, "dtype"):
        return value.shape, value.dtype
    return value


def describe_collective(key: tuple[Any, ...]) -> Operation:
    """Return the Operation that a key describes; slow, called once per key."""
    method, tensors, dtype, code, root = key
    if dtype is not None:
        tensors = (((tensors, dtype),),)
    reduce = ""
    if code >= 0:
        reduce = _REDUCE[code] if code < len(_REDUCE) else f"reduce operation {code}"
    name = OPERATIONS[method]
    rule = _COMPARED.get(name, "all")
    groups = [_flat(group) for group in tensors]
    compared = groups
    if rule == "first":
        compared = groups[0:1]
    elif rule == "second":
        compared = groups[1:2]
    facts = [(math.prod(shape), _dtype(dtype)) for group in compared for shape, dtype in group]
    parts = [dtype if rule == "dtypes" else f"{dtype}*{count}" for count, dtype in facts]
    if rule == "dtypes":
        parts = sorted(set(parts))
    settings = [reduce] if reduce else []
    if root >= 0:
        settings.append(f"root {root}")
    last: list[Any] = next((group for group in reversed(groups) if group), [])
    return Operation(name, "", " ".join([*settings, *parts]), ", ".join([*settings, *_show(last)]))


def describe_message(method: str, tensors: Any, me: int, peer: int, tag: int) -> Operation:
    """Return the Operation of a send or a receive; `me` and `peer` are global ranks, -1 for a receive from any rank."""
    name = OPERATIONS[method]
    shapes = _flat(_shapes(tensors))
    if name == "send":
        sender, receiver, direction = me, peer, f"to rank {peer}"
    else:
        sender, receiver, direction = peer, me, f"from rank {peer}" if peer >= 0 else "from any rank"
    arguments = [direction, f"tag {tag}"] if tag else [direction]
    match = " ".join(f"{_dtype(dtype)}*{math.prod(shape)}" for shape, dtype in shapes)
    return Operation(name, f"{sender}>{receiver}:{tag}", match, ", ".join([*arguments, *_show(shapes)]), peer)


def _flat(group: Any) -> list[Any]:
    """Return the (shape, dtype) pairs in nested tuples, without split sizes, which are numbers."""
    if not isinstance(group, tuple):
        return []
    if len(group) == 2 and isinstance(group[0], tuple) and not isinstance(group[1], tuple):
        return [group]
    return [pair for item in group for pair in _flat(item)]


def _show(shapes: list[Any]) -> list[str]:
    shown = [f"{_dtype(dtype)}[{'x'.join(map(str, shape))}]" for shape, dtype in shapes[:_MOST_SHOWN]]
    if len(shapes) > _MOST_SHOWN:
        shown.append(f"and {len(shapes) - _MOST_SHOWN} more")
    return shown


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# The source line of a call, found in about half a microsecond.


TORCH, SHARDWISE, LIBRARY, USER = range(4)
"""Owners of a source file; a library is any other installed package, such as Accelerate."""
_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_STANDARD_WRAPPERS = ("/contextlib.py", "/runpy.py", "/threading.py")


class Sites:
    """Finds the source line of a call: the innermost frame of user code, with that of a library that it called.

    Without user code, the innermost frame of a library or else of shardwise.
    """

    def __init__(self, torch_folder: str, intern: Callable[[str], int]) -> None:
        """Create a finder; `intern` stores a source line and returns its table position."""
        self._torch = torch_folder
        self._intern = intern
        self._kinds: dict[int, int] = {}
        self._places: dict[tuple[int, ...], int] = {}
        self._codes: list[CodeType] = []
        """References to all code objects seen, so that their addresses are not reused."""

    def find(self, frame: FrameType | None) -> int:
        """Return the table position of the calling line, from `frame` outwards; 0 if all frames are torch's."""
        kinds = self._kinds
        ours: FrameType | None = None
        library: FrameType | None = None
        while frame is not None:
            key = id(frame.f_code)
            kind = kinds[key] if key in kinds else self._learn(frame.f_code)
            if kind:
                if kind == USER:
                    return self._place(frame, library)
                if kind == LIBRARY:
                    library = library or frame
                else:
                    ours = ours or frame
            frame = frame.f_back
        found = library or ours
        return 0 if found is None else self._place(found)

    def _place(self, frame: FrameType, library: FrameType | None = None) -> int:
        key: tuple[int, ...] = (id(frame.f_code), frame.f_lasti)
        if library is not None:
            key += id(library.f_code), library.f_lasti
        place = self._places.get(key)
        if place is None:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            inside = f"{library.f_code.co_filename}:{library.f_lineno}" if library is not None else ""
            place = self._places[key] = self._intern(with_library(line, inside))
        return place

    def _learn(self, code: CodeType) -> int:
        kind = self.kind_of(code.co_filename)
        self._kinds[id(code)] = kind
        self._codes.append(code)
        return kind

    def kind_of(self, file: str) -> int:
        """Return the owner of a file; recorder, launcher and wrappers in the standard library count as TORCH."""
        if file.startswith((self._torch, "<", f"{_PACKAGE}/recorder", f"{_PACKAGE}/launcher")):
            return TORCH
        if file.startswith(_PACKAGE):
            return SHARDWISE
        if any(name in file for name in _STANDARD_WRAPPERS):
            return TORCH
        return LIBRARY if _INSTALLED.search(file) else USER


def with_library(line: str, library: str) -> str:
    """Return a source line of user code with the line of a library that it called, if any."""
    return f"{line} (in {_INSTALLED.split(library)[-1]})" if library else line
