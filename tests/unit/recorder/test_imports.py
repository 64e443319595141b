"""Doing something when a module is imported, whoever imports it."""

import importlib
import sys

import pytest

from shardwise.recorder.imports import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "late_module"
    sys.modules.pop("late_module", None)


def test_an_action_follows_the_import_and_finds_the_module_whole(module):
    seen = []
    when_imported({module: lambda: seen.append(sys.modules[module].value)})
    assert seen == []
    found = importlib.import_module(module)
    assert seen == [1]
    assert found.__spec__.loader is found.__loader__
    assert type(found.__loader__).__name__ == "SourceFileLoader"


def test_an_action_for_a_module_that_is_there_is_done_at_once(module):
    importlib.import_module(module)
    seen = []
    when_imported({module: lambda: seen.append(1)})
    assert seen == [1]


def test_a_module_that_does_not_exist_is_still_not_found(module):
    when_imported({"no_such_module_at_all": lambda: None})
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
