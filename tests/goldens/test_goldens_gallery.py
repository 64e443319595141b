"""Every job of the gallery trains as it did when the goldens were recorded: losses, names and checksums of weights."""

import pytest

from goldens import gallery
from goldens.mlx_gallery import FILES
from goldens.store import load, needs_recorded_versions, training_differences


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gallery")


@pytest.fixture(scope="module")
def jobs(folder):
    return gallery.load_gallery(folder)


def check(jobs, keys, num_ranks, folder, golden):
    found = gallery.train_gallery(jobs, keys, num_ranks, folder)
    assert found
    different = {name: training_differences(found[name], golden[name]) for name in found}
    assert {name: lines for name, lines in different.items() if lines} == {}


def test_every_job_of_the_gallery_is_recorded(jobs):
    assert {":".join(key) for key in gallery.single_keys(jobs)} == load("gallery_one_process").keys()
    assert {":".join(key) for key in gallery.pair_keys()} == load("gallery_two_ranks").keys()
    mlx = {path for path in gallery.EXAMPLES.rglob("*mlx/*.py") if 'engine="mlx"' in path.read_text()}
    assert mlx == {gallery.EXAMPLES / name for name in FILES}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.prove)], ids=["slice", "whole"])
def test_the_gallery_trains_as_recorded_on_one_process(jobs, folder, whole):
    needs_recorded_versions()
    keys = [key for key in gallery.single_keys(jobs) if whole or gallery.is_quick(key)]
    check(jobs, keys, 1, folder, load("gallery_one_process"))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.prove)], ids=["slice", "whole"])
def test_the_gallery_trains_as_recorded_on_two_ranks(jobs, folder, whole):
    needs_recorded_versions()
    keys = [key for key in gallery.pair_keys() if whole or gallery.is_quick(key)]
    check(jobs, keys, 2, folder, load("gallery_two_ranks"))
