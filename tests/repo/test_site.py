"""The site: pages are in sections, links lead to pages, the reference is complete, Sphinx has no warning."""

import re
import tomllib
from fnmatch import fnmatch

import pytest

import build_site
import reference
import shardwise
from shardwise.runs import console

WITHOUT_EXAMPLE = {
    "CallbackContext",
    "STOP",
    "watch",
    "ShardwiseError",
    "World",
    "Layout",
    "Metric",
    "metrics",
    "datasets",
    "losses",
    "models",
    "schedules",
}
"""Results of other functions, and modules, whose page lists their functions."""


@pytest.fixture(scope="module")
def site():
    return build_site.with_contents(build_site.collect(reference.pages()))


def test_every_page_is_in_a_section(site):
    sections = tomllib.loads((build_site.DOCS / "site.toml").read_text())["sections"]
    listed = ["index.md"]
    for section in sections:
        listed += [section["page"], *section.get("pages", [])]
    pages = [name for name, text in site.pages.items() if not text.startswith(build_site.ORPHAN)]
    pages = [name for name in pages if not build_site.is_generated(build_site.DOCS / name)]
    assert [name for name in pages if not any(fnmatch(name, pattern) for pattern in listed)] == []
    stored = [name for name in listed if "*" not in name]
    assert [name for name in stored if name not in site.pages] == []


def test_every_page_of_docs_is_in_the_site(site):
    names = [build_site.site_path(path) for path in build_site.DOCS.rglob("*.md")]
    assert [name for name in names if name not in site.pages] == []


def test_a_broken_link_fails():
    page = build_site.DOCS / "index.md"
    with pytest.raises(build_site.BrokenLinkError, match=r"gone\.md"):
        build_site.rewritten(page, "See [this](guides/gone.md).")
    text, targets = build_site.rewritten(page, "See [this](../examples/digits.py).\n\n```\n[x](y)\n```\n")
    assert "(examples/digits.py.md)" in text
    assert "[x](y)" in text
    assert targets == [build_site.ROOT / "examples" / "digits.py"]


def test_the_reference_has_every_option_of_every_command():
    pages = reference.pages()
    for path, command in reference.commands():
        page = pages[f"reference/commands/{path[0]}.md"]
        assert f"shardwise {' '.join(path)} [OPTIONS]" in page or not command.params
        missing = [option for parameter in command.params for option in parameter.opts if option not in page]
        assert [option for option in missing if option.startswith("-")] == []


def test_the_reference_has_every_public_name_with_an_example():
    page = reference.python_page()
    assert [name for name in shardwise.__all__ if f"### sw.{name}\n" not in page] == []
    without = {name for name in shardwise.__all__ if reference.find_example(name) is None}
    documented_by_command = {"doctor", "doctor_net", "doctor_run", "doctor_drill", "no_sync"}
    assert without - WITHOUT_EXAMPLE - documented_by_command == set()


def test_the_reference_has_every_exit_code():
    codes = {name for name, value in vars(console).items() if name.isupper() and type(value) is int}
    assert set(reference.EXIT_CODES) == codes


def test_the_reference_shows_the_message_of_an_error():
    page = reference.error_code_page()
    entry = page.partition("### plan.batch-not-divisible\n")[2].partition("###")[0]
    assert "{" in entry
    assert "shardwise/plans/" in entry


def test_no_page_loads_something_from_another_host():
    files = [build_site.DOCS / "conf.py", *(build_site.DOCS / "_static").iterdir()]
    assert [file for file in files if re.search(r"https?://", file.read_text())] == []


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning(site, tmp_path):
    assert build_site.build(tmp_path, site) == 0
    assert (tmp_path / "searchindex.js").is_file()
    loaded = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"https?://")
    assert [page for page in tmp_path.rglob("*.html") if loaded.search(page.read_text())] == []


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_a_link_to_a_heading_that_does_not_exist_fails_the_build(tmp_path, capfd):
    site = build_site.Site(pages={"index.md": "# Title\n\n[x](other.md#gone)\n\n```{toctree}\nother.md\n```\n"})
    site.pages["other.md"] = "# Other\n"
    assert build_site.build(tmp_path, site) != 0
    assert "gone" in capfd.readouterr().err
