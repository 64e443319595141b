"""The drawings of the concept pages are those of the script, and every page shows one."""

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "drawings.py"))
PAGES = sorted((ROOT / "docs" / "concepts").glob("*.md"))


@pytest.mark.parametrize("name", SCRIPT["DRAWINGS"])
def test_a_committed_drawing_is_what_the_script_draws(name):
    drawn = SCRIPT["DRAWINGS"][name]().render()
    ET.fromstring(drawn)
    committed = ROOT / "docs" / "images" / f"concept-{name}.svg"
    assert committed.read_text() == drawn, "run python scripts/drawings.py"


def test_every_drawing_has_a_page_with_a_command_a_gallery_chapter_and_a_reference():
    for name in SCRIPT["DRAWINGS"]:
        page = (ROOT / "docs" / "concepts" / f"{name}.md").read_text()
        assert f"](../images/concept-{name}.svg)" in page
        assert "```bash\n" in page
        assert "](../../examples/" in page.partition("**Gallery**")[2]
        assert "](https://" in page.partition("**References**")[2]


def test_no_page_shows_a_drawing_that_does_not_exist():
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.name} shows {target}"


def test_text_that_does_not_fit_is_an_error():
    drawing = SCRIPT["Drawing"]("a title", "a description", 100)
    with pytest.raises(ValueError, match="needs"):
        drawing.box(10, 40, 60, 30, "far too long for this box")
