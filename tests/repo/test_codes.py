"""Every error of the family carries a code: `area.condition`, written where the error is made."""

import ast
import re
import tomllib
from pathlib import Path

from error_codes import keywords, literals, passed_on, sites

ROOT = Path(__file__).resolve().parents[2]
AREAS = (
    "job|loss|optimizer|model|data|plan|layout|hardware|env|extra|world|rendezvous|launch|train|checkpoint|verify|bench"
    "|doctor|run|watch|cli|spec|engine|support"
)
"""What an error is about, by the parts of the product that users know: packages may be renamed, areas not."""
CODE = re.compile(rf"({AREAS})\.[a-z0-9]+(-[a-z0-9]+)*")


def test_every_error_has_a_code():
    assert [place for place, _, code in sites() if code is None] == []


def test_codes_name_an_area_and_a_condition():
    wrong = []
    for place, call, code in sites():
        if code is None or place.startswith("src/shardwise/errors.py"):  # which fills in the name of an extra
            continue
        found = literals(code)
        if found is None or not all(map(CODE.fullmatch, found)):
            wrong.append(f"{place} {ast.unparse(code)}")
        if {"code", "fix"} <= set(keywords(call)):
            order = [keyword.arg for keyword in call.keywords]
            assert order.index("code") < order.index("fix"), f"{place}: the code stands before the fix"
    assert wrong == []


def test_codes_that_are_passed_on_are_written_as_codes():
    """A function that makes errors for several callers takes the code from them."""
    written = [code for _, _, value in (*sites(), *passed_on()) for code in literals(value) or [] if code]
    assert written
    assert [code for code in written if not CODE.fullmatch(code)] == []


def test_every_extra_makes_a_code():
    """MissingExtraError.of fills in the name of an extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras
    assert [name for name in extras if not CODE.fullmatch(f"extra.{name}-missing")] == []
