"""Ranks that are fresh interpreters: recorded from before their script, with nothing of ours left in their way."""

import os
import subprocess
import sys

from shardwise.recorder.start import record_variables
from shardwise.runs import RunDirectory, calls
from shardwise.runs.call_reader import CallReader


def run(code, folder, **environ):
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **environ}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, **record_variables(environ, folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_record_is_begun_before_the_script(tmp_path):
    [pid] = run("import os; print(os.getpid())", tmp_path)
    reader = CallReader(RunDirectory(tmp_path).calls(0))
    reader.refresh()
    assert reader.header(calls.PID) == int(pid)


def test_the_script_and_its_children_see_nothing_of_it(tmp_path):
    code = (
        "import os, sys; print([v for v in os.environ.values() if 'recorder/site' in v]);"
        " print([p for p in sys.path if 'recorder/site' in p]);"
        " print('SHARDWISE_RECORD' in os.environ, 'torch' in sys.modules)"
    )
    assert run(code, tmp_path / "run") == ["[]", "[]", "False False"]


def test_the_users_own_path_and_sitecustomize_stay(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('mine')\n")
    lines = run("import os; print(os.environ['PYTHONPATH'])", tmp_path / "run", PYTHONPATH=str(own))
    assert lines == ["mine", str(own)]


def test_an_error_in_the_users_sitecustomize_is_reported_as_without_a_record(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import no_such_module\n")
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONPATH": str(own)}
    command = [sys.executable, "-c", ""]
    plain, recorded = (
        subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stderr
        for variables in (environ, {**environ, **record_variables(environ, tmp_path / "run")})
    )
    assert recorded == plain
    assert "No module named 'no_such_module'" in plain


def test_an_interpreter_that_is_asked_for_nothing_records_nothing(tmp_path):
    environ = {**os.environ, **record_variables(os.environ, tmp_path / "run")}
    del environ["SHARDWISE_RECORD"]
    subprocess.run([sys.executable, "-c", ""], env=environ, check=True)
    assert not (tmp_path / "run").exists()
