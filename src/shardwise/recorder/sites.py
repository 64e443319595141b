"""Which line of the user's source a call comes from, found in about half a microsecond."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

_TORCH, _OURS, _USER = range(3)
_PACKAGE = str(Path(__file__).parents[1])


class Sites:
    """Finds the first frame outside torch and shardwise; the first of shardwise's own where there is none."""

    def __init__(self, torch_folder: str, intern: Callable[[str], int]) -> None:
        """Keep the lines that are found by `intern`, which returns their places."""
        self._torch = torch_folder
        self._intern = intern
        self._kinds: dict[int, int] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._codes: list[CodeType] = []
        """All code that was seen, kept so that its address stays its own."""

    def find(self, frame: FrameType | None) -> int:
        """Return the place of the line that calls, from `frame` outwards; 0 if torch is all there is."""
        kinds = self._kinds
        ours: FrameType | None = None
        while frame is not None:
            key = id(frame.f_code)
            kind = kinds[key] if key in kinds else self._learn(frame.f_code)
            if kind:
                if kind == _USER:
                    return self._place(frame)
                ours = ours or frame
            frame = frame.f_back
        return 0 if ours is None else self._place(ours)

    def _place(self, frame: FrameType) -> int:
        key = id(frame.f_code), frame.f_lasti
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._intern(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return place

    def _learn(self, code: CodeType) -> int:
        kind = self.kind_of(code.co_filename)
        self._kinds[id(code)] = kind
        self._codes.append(code)
        return kind

    def kind_of(self, file: str) -> int:
        """Return whose file this is: 0 torch's, with what Python brings in between, 1 shardwise's, 2 the user's."""
        if file.startswith((self._torch, "<")):
            return _TORCH
        if file.startswith(_PACKAGE):
            return _TORCH if file.startswith((f"{_PACKAGE}/record", f"{_PACKAGE}/launch")) else _OURS
        return _TORCH if "/contextlib.py" in file or "/runpy.py" in file or "/threading.py" in file else _USER
