import io

import pytest

from shardwise.runs.console import echo, echo_error


@pytest.mark.parametrize(("write", "name"), [(echo, "stdout"), (echo_error, "stderr")])
def test_text_that_the_terminal_cannot_show_is_escaped(monkeypatch, write, name):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(f"sys.{name}", terminal)
    write("café odd \udcff")
    assert terminal.buffer.getvalue() == b"caf\\xe9 odd \\udcff\n"
