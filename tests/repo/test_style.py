"""The tree keeps its shape: every figure of scripts/style_table.py is at its target, or no worse than it has become."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "style_table.py"
BASE = {"files": 339, "lines": 76_750}
"""Figures that were still above their target when the tree was last restructured: lower them, never raise them."""
ADDED = {
    # What a feature added to the tree since then. A change that is not a feature may not add an entry.
    "lower precision and float8": {"files": 3, "lines": 760},
    "Muon": {"files": 2, "lines": 740},
    "the measured race of auto": {"files": 2, "lines": 800},
    "its restarts and memory, the search for fixed fields, the plan of node 0": {"files": 3, "lines": 490},
    "compiled graphs kept in a run": {"files": 1, "lines": 230},
    "notes and refusals found in trials of a first hour": {"lines": 180},
    "float8 gathers, fp32 accumulation under DDP, head and loss in one graph under FSDP": {"lines": 380},
    "costs and intervals calibrated on published runs": {"files": 2, "lines": 370},
    "predictions of a plan of one's own, hints, budgets and a page": {"files": 7, "lines": 1_680},
    "wider search, partial recompute, corrections by own runs": {"files": 3, "lines": 780},
    "token sources, data prepare and inspect": {"files": 14, "lines": 2_470},
    "corpora: mixtures, packing, exact positions, data mix": {"files": 10, "lines": 1_460},
    "token sources on object storage": {"files": 7, "lines": 1_010},
    "documents tokenized during training, verified streams": {"files": 2, "lines": 570},
    "attention in blocks and context parallelism on packed rows, leak check of verify": {"files": 3, "lines": 470},
    "batches without an object per row, waits for data": {"files": 2, "lines": 260},
    "config.json of qwen3, olmo2 and gpt_neox": {"files": 1, "lines": 200},
    "image folders and tar shards, errors of loader workers": {"files": 3, "lines": 950},
    "checkpoints on object storage": {"files": 7, "lines": 1_220},
    "float8 by shards and measured width, kept on resume; notes on graph breaks and shapes": {"files": 2, "lines": 390},
    "packed rows and token ids refused under all engines": {"lines": 90},
    "costs of float8 gathers, of fp32 accumulation and of a compiled head": {"files": 1, "lines": 260},
    "reasons of plan that name sufficient savings and the cause of a limit, idle devices": {"files": 1, "lines": 290},
    "corpora in custom loops, identities of token files, documents that are not split": {"lines": 340},
    "exit of processes whose threads wait for a core": {"lines": 20},
    "float8 under tp and with adapters, training without a compiler, refusals of plan and data": {"lines": 240},
    "checksums at the start, shards of long documents, data mix by groups, ignored inputs": {"lines": 310},
    "recompute in compiled graphs, batch norm in chunks of rows": {"lines": 60},
    "leaks in rows of one document, streams that are split by rank": {"lines": 140},
    "plan: searches with the fields of --set and --compile, intervals of own runs": {"files": 1, "lines": 520},
    "numbers of devices searched for a batch that does not divide, advice that the search verified": {
        "files": 2,
        "lines": 500,
    },
    "memory of compiled blocks and losses, of float8 layers and of tied heads": {"files": 1, "lines": 130},
    "head and loss in one graph on one rank, padded vocabularies, compiled updates of fp32 parameters": {"lines": 220},
}
REACHED = {name: base + sum(each.get(name, 0) for each in ADDED.values()) for name, base in BASE.items()}


def load_script():
    spec = importlib.util.spec_from_file_location("style_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names of annotations
    spec.loader.exec_module(module)
    return module


style = load_script()


def test_figures_are_at_their_targets_or_no_worse_than_they_have_become():
    figures = {figure.name: figure for figure in style.measure(style.read_tree())}
    worse = []
    for name, figure in figures.items():
        limit = REACHED.get(name, figure.target)
        if figure.value > limit:
            worse.append(f"{name}: {figure.value:g} > {limit:g}\n" + "\n".join(figure.places[-20:]))
    assert not worse, "\n".join(worse)
    assert [name for name, value in REACHED.items() if value <= figures[name].target] == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("def f(rows):\n    return [x for row in rows for x in row if x]\n", "nested comprehensions with conditions"),
        ("def f(a, b):\n    return 1 if a else 2 if b else 3\n", "nested conditional expressions"),
        ("def f():\n    from shardwise import errors\n    return errors\n", "imports inside functions"),
        ("import torch\n\nx = torch._C._get_something\n", "files that touch private torch names"),
        ("from torch.nn.modules.batchnorm import _BatchNorm\n", "files that touch private torch names"),
    ],
)
def test_figures_count_what_they_name(tmp_path, monkeypatch, code, name):
    package = tmp_path / "src" / "shardwise"
    package.mkdir(parents=True)
    (package / "probe.py").write_text(code + "\n\nclass Probe:\n    def method(self):\n        pass\n")
    monkeypatch.setattr(style, "SOURCE", package)
    counted = {figure.name: figure.value for figure in style.measure(style.read_tree(package) * 2)}
    assert counted[name] > 0


def test_a_circle_of_imports_is_named():
    assert set(style.cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()})[0]) == {"b", "c"}
