"""`sw.launch` of a script from Python: a report, and nothing of the caller's process is touched."""

import subprocess

import shardwise as sw
from shardwise.launcher.local.function import run_forked


def test_a_script_is_launched_from_python_and_other_children_of_the_caller_live_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("import os, sys\nsys.exit(int(sys.argv[1]) * int(os.environ['RANK']))\n")

    def call(_rank):
        with subprocess.Popen(["sleep", "600"]) as child:
            try:
                reports = [sw.launch("script.py", code, nproc=2, log_dir=f"run{code}") for code in (0, 3)]
                return reports, child.poll()
            finally:
                child.kill()

    [((done, failed), ended)] = run_forked(call, 1, timeout_s=100)
    assert ended is None
    assert (done.exit_code, done.run, done.failure) == (0, "run0", "")
    assert failed.exit_code == 1
    assert "rank 1 failed first" in failed.failure
