"""Fixtures of tests in MLX."""

import mlx.core as mx
import pytest


@pytest.fixture
def uncompiled():
    """Let MLX compute without compiled kernels, which take a C++ compiler seconds each; a test may turn them on."""
    mx.disable_compile()
