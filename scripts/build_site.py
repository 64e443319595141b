"""Build the documentation site with Sphinx: every warning is an error.

Usage: python scripts/build_site.py [OUT]

The site has the pages of `docs/`, the generated reference (`scripts/reference.py`), and every file elsewhere in the
repository that a page links to: Markdown as a page, source files as pages that show their text. Links are rewritten
from the repository's layout to that of the site, so that the same page works on a code host and in the site.
`docs/site.toml` has the order of the pages; a page that is in no section fails the build, and so does a broken link.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json"}
ORPHAN = "---\norphan: true\n---\n"
"""How a page that no section lists begins."""
GENERATED_LIST = "<!-- generated pages -->"


class BrokenLinkError(Exception):
    """A link that leads to no file of the repository."""


@dataclass
class Site:
    """Pages by their path in the site, and files that are copied as they are."""

    pages: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)


def collect(generated):
    """Return the site: the pages of docs, all that they link to, and the generated pages."""
    site = Site()
    waiting = sorted(DOCS.rglob("*.md"))
    while waiting:
        path = waiting.pop()
        name = site_path(path)
        if name in site.pages or name in site.files:
            continue
        if path.suffix == ".md":
            text, targets = rewritten(path)
            site.pages[name] = text
            waiting += targets
        elif path.suffix in {".svg", ".png"}:
            site.files[name] = path
        else:
            site.pages[name] = source_page(path)
    for name, text in generated.items():
        site.pages[name], targets = rewritten(DOCS / name, text)
        for target in targets:
            if site_path(target) not in site.pages:
                site.pages[site_path(target)] = source_page(target)
    return site


def site_path(path):
    """Return the path in the site of a file of the repository."""
    name = str(path.relative_to(DOCS) if path.is_relative_to(DOCS) else path.relative_to(ROOT))
    return name if path.suffix in {".md", ".svg", ".png"} else f"{name}.md"


def rewritten(path, text=None):
    """Return the text of a page with the links of the site, and the files that it links to."""
    targets = []
    here = Path(site_path(path)).parent

    def link(match):
        target = Path(os.path.normpath(path.parent / match[1]))
        if (target / "README.md").is_file():
            target /= "README.md"
        if target.exists():
            targets.append(target)
        elif not is_generated(target):
            raise BrokenLinkError(f"{path.relative_to(ROOT)} links to {match[1]}, which does not exist")
        return os.path.relpath(site_path(target), here) + (match[2] or "")

    parts = FENCED.split(path.read_text() if text is None else text)
    for index in range(0, len(parts), 2):
        parts[index] = LINK.sub(link, parts[index])
    return "".join(parts), targets


def is_generated(path):
    """Return whether a page of the reference is made by `scripts/reference.py` and not stored."""
    return path.parent in {DOCS / "reference", DOCS / "reference" / "commands"}


def source_page(path):
    """Return a page that shows a source file, or the files of a folder."""
    parts = [f"{ORPHAN}# {path.relative_to(ROOT)}"]
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir():
            parts.append(f"## {file.name}")
        parts.append(f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}````")
    return "\n\n".join(parts) + "\n"


def with_contents(site):
    """Add to every section's page the table of contents of its pages, which Sphinx shows in the sidebar."""
    sections = tomllib.loads((DOCS / "site.toml").read_text())["sections"]
    site.pages["index.md"] += _toctree([f"{section['title']} <{section['page']}>" for section in sections])
    listable = sorted(name for name, text in site.pages.items() if not text.startswith(ORPHAN))
    for section in sections:
        names = []
        for pattern in section.get("pages", []):
            found = [name for name in listable if fnmatch(name, pattern) and name != section["page"]]
            names += found or [pattern]
        page = section["page"]
        if section.get("generated"):
            made = sorted(name for name in site.pages if is_generated(DOCS / name) and not (DOCS / name).is_file())
            site.pages[page] = site.pages[page].replace(GENERATED_LIST, _bullets(made, site, Path(page).parent))
            names = made + names
        if names:
            site.pages[page] += _toctree([os.path.relpath(name, Path(page).parent) for name in names])
    return site


def _bullets(names, site, here):
    lines = []
    for name in names:
        title = re.search(r"^# (.*)$", site.pages[name], re.MULTILINE)[1]
        lines.append(f"- [{title}]({os.path.relpath(name, here)})")
    return "\n".join(lines)


def _toctree(entries):
    return "\n\n```{toctree}\n:hidden:\n:maxdepth: 1\n\n" + "\n".join(entries) + "\n```\n"


def write(site, folder):
    """Write the sources of the site and its settings into a folder."""
    for name, text in site.pages.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    for name, path in site.files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    shutil.copyfile(DOCS / "conf.py", folder / "conf.py")
    shutil.copytree(DOCS / "_static", folder / "_static")


def build(out, site):
    """Run Sphinx on the site and return its exit code; a warning fails."""
    with tempfile.TemporaryDirectory() as folder:
        write(site, Path(folder))
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", folder, str(out)]
        return subprocess.run(command, check=False).returncode


def main():
    """Build the site into `site/`, or into the folder that is given."""
    import reference

    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    code = build(out, with_contents(collect(reference.pages())))
    if code == 0:
        print(f"the site is in {out}/index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
