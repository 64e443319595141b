"""Fixtures of the whole suite."""

import gc
import os
import shutil
import signal
import tempfile

import pytest
import pytest_randomly

from apart import is_apart, run_apart
from huge_pages import HugePages

# While modules are imported and tests collected, garbage collections take half of the time, and free nothing.
gc.disable()

# DeepSpeed registers a seeder here: every process of tests would import it, for 5 s, where few need it.
pytest_randomly.entrypoint_reseeds = []

# Under nohup or in the background of a script this process ignores them, and so would what tests send them to.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Compute with one thread in the process that runs tests: its forks would wait for threads of OpenMP forever.

    Tests run beside each other on all cores, so that more threads would only wait for each other.
    """
    if not hasattr(config, "workerinput"):  # workers inherit the variable
        # Neither runs of tests in the user's history, nor predictions of tests that own runs have corrected.
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="shardwise-tests-")
    distributes_only = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if distributes_only:
        gc.enable()  # it collects no tests
    else:
        import torch  # here: the process that only distributes tests does not need it

        torch.set_num_threads(1)
        os.environ.pop("GLIBC_TUNABLES", None)  # of this process, not of the programs that tests start
        config.pluginmanager.register(HugePages())


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Leave what was imported and collected out of garbage collections, in this process and in its forks."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config):
    """Remove the cache of this run."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_xdist_auto_num_workers():
    """Return one worker more than cores: it computes while another waits for ranks to start or for a timeout."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def _no_launcher_variables(monkeypatch):
    """Tests do not see the launcher they may themselves run under."""
    for name in list(os.environ):
        if name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Keep this process to one OpenMP thread: a fork cannot use a pool whose threads stayed behind, and would hang."""
    import torch  # here: the process that only distributes tests does not need it

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def forked_parents():
    """Have launchers that run in this process fork their fork parent from it."""
    import fork_parents  # here: it imports torch, which the process that only distributes tests does not need

    fork_parents.import_for_ranks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_parents.ForkStarter, "start", fork_parents.start_by_fork)
        yield


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
