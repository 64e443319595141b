"""MLX jobs of the gallery train as they did when the goldens were recorded."""

import importlib.util
from importlib.metadata import version

import pytest

from goldens.store import load, training_differences

if importlib.util.find_spec("mlx") is None:
    pytest.skip("MLX is not installed: pip install 'shardwise[mlx]'", allow_module_level=True)


def test_mlx_jobs_of_the_gallery_train_as_recorded(tmp_path):
    from goldens.mlx_gallery import train

    if not version("mlx").startswith("0.32"):
        pytest.skip(f"the values were recorded with MLX 0.32, this is {version('mlx')}")
    found, golden = train(tmp_path), load("gallery_mlx")
    assert found.keys() == golden.keys()
    different = {name: training_differences(found[name], golden[name]) for name in golden}
    assert {name: lines for name, lines in different.items() if lines} == {}
