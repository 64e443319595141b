import sys

import pytest

from refusals import refuses
from shardwise.launcher.local.warm_place import import_environment, open_place, place_path, warm_key


def test_server_gets_what_imports_read_and_nothing_else():
    given = {"TORCH_LOGS": "all", "LD_PRELOAD": "x.so", "OMP_NUM_THREADS": "2", "OMP_PROC_BIND": "true", "TOKEN": "t"}
    assert import_environment(given) == {"LD_PRELOAD": "x.so", "OMP_PROC_BIND": "true", "TORCH_LOGS": "all"}


def test_relative_entries_of_the_path_mean_the_same_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert import_environment({"PYTHONPATH": "src:/lib"}) == {"PYTHONPATH": f"{tmp_path}/src:/lib"}


def test_key_tells_interpreters_and_imports_apart(monkeypatch):
    plain = warm_key({})
    assert plain == warm_key({"OMP_NUM_THREADS": "2", "MASTER_PORT": "1"})
    assert plain != warm_key({"PYTHONHASHSEED": "1"})
    monkeypatch.setattr(sys, "executable", "/usr/bin/another")
    assert plain != warm_key({})


def test_runtime_folder_of_another_user_is_not_used(tmp_path):
    assert place_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "shardwise"
    absent = {"XDG_RUNTIME_DIR": str(tmp_path / "absent"), "TMPDIR": str(tmp_path)}
    assert place_path(absent).parent == tmp_path


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_folder_that_others_may_enter_is_refused(tmp_path, mode):
    (tmp_path / "place").mkdir()
    (tmp_path / "place").chmod(mode)
    with refuses("launch.socket-folder-shared"), open_place(tmp_path / "place"):
        pass


def test_linked_folder_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "place").symlink_to(tmp_path / "real")
    with refuses("launch.socket-folder-failed"), open_place(tmp_path / "place"):
        pass
