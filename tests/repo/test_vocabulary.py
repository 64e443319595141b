"""Source, examples, benchmarks, scripts and tests use the field's vocabulary: private words may only become fewer."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = ("src", "examples", "benchmarks", "scripts", "tests")
PRIVATE = {
    # What not to write -> how often it still stands in each of TREES, None where it is also a term of the field: lower
    # a number, never raise it. docs/glossary.md has the words to write in their place.
    r"readers?": (75, 0, 4, 0, None),
    r"words?": (124, 0, 0, 0, 16),
    r"told|tells?|telling": (3, 0, 0, 0, 0),
    r"cuts?": (7, 0, 1, 0, 21),
    r"held|holdings?": (0, 0, 0, 0, 1),
    r"rooms?": (0, 0, 0, 0, 0),
    r"meets?|meetings?": (3, 0, 0, 0, 1),
    r"met": (1, 0, None, None, None),
    r"blueprints?": (0, 0, 0, 0, 0),
    r"(?:go|goes|going|went|gone) on": (0, 0, 0, 0, 0),
    r"said|says?": (6, 0, 0, 0, 2),
    r"(?:lay|lays|laid) out|draw(?:s|n)? up": (0, 0, 0, 0, 0),
    r"is (?:not there|no [a-z]+)": (8, 0, 1, 0, 0),
    r"quicker|more involved": (0, 0, 0, 0, 0),
    r"stood still|farewell|strangers?": (0, 0, 0, 0, 0),
    r"journeys?|beds?|house": (0, 0, 0, 0, 0),
    r"look(?:s|ed|ing)? (?:on|after)": (0, 0, 0, 0, 0),
}
GIVEN = r"tie_word_embeddings|word_embed_proj_dim|WordLevel|CallReader|call_reader|held[-_]out|min_cut"
"""Names of other libraries and terms of the field that contain a private word."""


def tokens_of(text):
    """Return the text with identifiers split into their words: `per_reader` and `PerReader` have a reader."""
    text = re.sub(GIVEN, "", text)
    text = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text.replace("_", " "))
    return text.lower()


def text_of(tree):
    paths = [path for path in sorted((ROOT / tree).rglob("*.py")) if path != Path(__file__).resolve()]
    return "\n".join(tokens_of(path.read_text()) for path in paths)


TEXTS = {tree: text_of(tree) for tree in TREES}


@pytest.mark.parametrize("words", PRIVATE)
def test_a_private_word_is_no_more_frequent_than_it_has_become(words):
    found = {tree: len(re.findall(rf"\b(?:{words})\b", text)) for tree, text in TEXTS.items()}
    limits = dict(zip(TREES, PRIVATE[words], strict=True))
    assert {tree: found[tree] for tree in TREES if limits[tree] is not None and found[tree] > limits[tree]} == {}
