"""Fixtures of the whole suite."""

import os
import signal

import pytest
import pytest_randomly

from apart import is_apart, run_apart

# DeepSpeed registers a seeder here: every process of tests would import it, for 5 s, where few need it.
pytest_randomly.entrypoint_reseeds = []

# Under nohup this process ignores it, and so would the launchers that tests send it to.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _no_launcher_variables(monkeypatch):
    """Tests do not see the launcher they may themselves run under."""
    for name in list(os.environ):
        if name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Run what is about MLX in forks, so that no test leaves a process that cannot be forked."""
    if not is_apart(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run_apart(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # what earlier tests kept for this one
    return True


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Leave the cells of a matrix that are not marked as representative to `make prove`."""
    made = yield
    matrix = made if isinstance(made, list) else []
    marker = matrix[0].get_closest_marker("representative") if matrix else None
    if marker is not None:
        ids = set(marker.args)
        unknown = ids - {item.callspec.id for item in matrix}
        if unknown:  # or a matrix whose ids changed would leave `make test` without notice
            raise collector.CollectError(f"{name} has no cell {sorted(unknown)}")
        for item in matrix:
            if item.callspec.id not in ids:
                item.add_marker(pytest.mark.prove)
    return made


def pytest_collection_modifyitems(items):
    """Begin with the long tests: at the end the workers share what is left, which must not be one long test."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
