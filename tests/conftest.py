"""Fixtures of the whole suite."""

import os

import pytest
import pytest_randomly

# DeepSpeed registers a seeder here: every process of tests would import it, for 5 s, where few need it.
pytest_randomly.entrypoint_reseeds = []


@pytest.fixture(autouse=True)
def _no_launcher_variables(monkeypatch):
    """Tests do not see the launcher they may themselves run under."""
    for name in list(os.environ):
        if name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
