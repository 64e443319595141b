"""Parameter names, first weights, dropout masks and sample orders are those of the first edition."""

import pytest

from goldens import draws
from goldens.store import load, needs_recorded_versions, weight_differences


@pytest.fixture(scope="module")
def drawn():
    return draws.draws()


def test_parameter_names_and_shapes_of_every_model_are_as_recorded():
    found, golden = draws.parameter_names(), load("parameter_names")
    assert found.keys() == golden.keys()
    assert {name: found[name] for name in golden if "t5" not in name} == {
        name: lines for name, lines in golden.items() if "t5" not in name
    }
    needs_recorded_versions()  # transformers names the parameters of T5
    assert found == golden


def test_first_weights_are_drawn_as_recorded(drawn):
    needs_recorded_versions()
    found, golden = drawn["first weights"], load("draws")["first weights"]
    assert found.keys() == golden.keys()
    different = {name: weight_differences(found[name], golden[name], 1e-9) for name in golden}
    assert {name: lines for name, lines in different.items() if lines} == {}


def test_dropout_masks_of_a_key_are_as_recorded(drawn):
    assert drawn["masks"] == load("draws")["masks"]


@pytest.mark.parametrize("name", ["order", "order of two ranks"])
def test_samples_come_in_the_recorded_order(drawn, name):
    assert drawn[name] == load("draws")[name]
