"""Tests in forks of their own: a process that has computed with MLX has a thread that its forks lack, and they hang."""

import faulthandler
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol


def is_apart(item):
    """Whether a test is about MLX, by the name of its file or folder."""
    return any("mlx" in part for part in Path(item.nodeid.partition("::")[0]).parts)


def run_apart(item):
    """Run a test in a fork and return its reports."""
    item.config._tmp_path_factory.getbasetemp()  # else every fork would make one, and clear away old ones
    importlib.import_module("torch._dynamo")  # else every fork that has ranks would, in 1.5 s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reports.json")
        pid = os.fork()
        if pid == 0:
            _run(item, path)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not path.exists():
            message = f"the fork of this test ended with status {status} and no report"
            return [pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")]
        convert = item.config.hook.pytest_report_from_serializable
        return [convert(config=item.config, data=data) for data in json.loads(path.read_text())]


def _limit_s(item):
    """Return the seconds that a test may take."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getoption("timeout") or item.config.getini("timeout"))


def _run(item, path):
    try:
        faulthandler.dump_traceback_later(0.95 * _limit_s(item), exit=True)  # before the limit: to show where it stands
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # threads of OMP did not survive the fork either
        for finalizers, _ in item.session._setupstate.stack.values():
            finalizers.clear()  # what was set up before the fork ends where it was set up
        reports = runtestprotocol(item, log=False, nextitem=None)
        convert = item.config.hook.pytest_report_to_serializable
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps([convert(config=item.config, report=report) for report in reports]))
        partial.rename(path)
    finally:
        os._exit(0)
