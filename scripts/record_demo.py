"""Draws docs/images/demo.svg: runs the demo in a terminal of its own and keeps what the screen shows (needs pyte)."""

import io
import os
import pty
import sys
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 110, 46
ROOT = Path(__file__).resolve().parents[1]


def record(command):
    """Run `command` in a pseudo-terminal; return what its screen shows at the end."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)

    def read(descriptor):
        data = os.read(descriptor, 4096)
        stream.feed(data)
        return data

    os.environ.update(COLUMNS=str(COLUMNS), LINES=str(ROWS), TERM="xterm-256color")
    pty.spawn(command, read)
    return screen_text(screen)


def screen_text(screen):
    """The screen as rich text, with its colours."""
    text = Text()
    for row in range(ROWS):
        line = Text()
        for column in range(COLUMNS):
            cell = screen.buffer[row][column]
            line.append(cell.data, style=f"{'bold ' if cell.bold else ''}{colour(cell.fg)}")
        line.rstrip()
        text.append_text(line).append("\n")
    text.rstrip()
    return text


def colour(name):
    """Translate pyte's colour names, hexadecimal included, into rich's."""
    if len(name) == 6 and all(character in "0123456789abcdef" for character in name):
        return f"#{name}"
    return {"default": "", "brown": "yellow"}.get(name, name)


if __name__ == "__main__":
    final = record([*sys.argv[1:]] or [".venv/bin/shardwise", "train", "examples/digits.py", "--nproc", "2"])
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text("$ make demo\n", style="bold").append_text(final))
    console.save_svg(str(ROOT / "docs" / "images" / "demo.svg"), title="shardwise")
