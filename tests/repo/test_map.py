"""The map of the repository is true: every path on it exists, every package is on it, its example of a test passes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "shardwise"
MAP = ROOT / "ARCHITECTURE.md"
PAGES = [MAP, ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"]


def named_paths(text):
    """Return what stands in backquotes and looks like a path."""
    return sorted(set(re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.\w+)?|[\w-]+\.(?:py|md|toml))`", text)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_on_the_map_exists(page):
    places = (SOURCE, ROOT, page.parent)
    named = named_paths(page.read_text())
    assert named
    inner = {path.name for path in SOURCE.rglob("*") if path.is_dir()}
    missing = [path for path in named if not any((place / path).exists() for place in places)]
    assert [path for path in missing if path.rstrip("/") not in inner] == []


def test_every_package_stands_on_the_map():
    text = MAP.read_text()
    packages = [path.parent.name for path in SOURCE.glob("*/__init__.py")]
    assert [name for name in packages if f"`{name}/`" not in text] == []


def test_the_example_of_a_test_with_ranks_passes():
    code = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
    scope = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), scope)
    scope["test_sum_is_equal_on_every_rank"]()
