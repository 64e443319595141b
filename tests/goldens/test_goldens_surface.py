"""What the first edition offered is still there, or CHANGELOG.md names what became of it."""

from pathlib import Path

from goldens import surface
from goldens.store import load

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"


def changelog():
    return CHANGELOG.read_text() if CHANGELOG.exists() else ""


def test_changed_options_of_the_command_line_stand_in_the_changelog():
    """An option that is gone, or has another type or default, is named in backquotes: `launch --warm`."""
    found, listed = surface.command_line(), changelog()
    changed = []
    for command, parameters in load("surface")["command line"].items():
        lost = [parameter for parameter in parameters if parameter not in found.get(command, [])]
        changed += [f"`{command} {parameter.partition(',')[0]}`" for parameter in lost]
    assert [name for name in changed if name not in listed] == []


def test_changed_public_names_stand_in_the_changelog():
    """A name that is gone, or has lost a parameter or a member, is named in backquotes: `sw.export`."""
    found, listed = surface.public_names(), changelog()
    changed = []
    for name, recorded in load("surface")["python"].items():
        lost = _names(recorded) - _names(found.get(name, ""))
        changed += [f"`sw.{name}`"] if lost else []
    assert [name for name in changed if name not in listed] == []


def _names(offered):
    return set(offered.strip("()").replace(",", " ").split())
