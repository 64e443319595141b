"""Every --json output has the keys and types of the first edition, and plans have its values."""

import pytest

from goldens import outputs
from goldens.store import load


@pytest.fixture(autouse=True)
def _nothing_measured_before(monkeypatch, tmp_path):
    """A calibration in the user's cache would change what is predicted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def check_keys(name, arguments):
    code, found = outputs.output_of(name, arguments)
    assert outputs.schema_differences(outputs.schema(found), load("schemas")[name]) == []
    return code, found


def test_every_command_with_json_is_recorded():
    """By the first arguments of what is run, and `doctor run`, which reads the recorded runs."""
    with_json = {name for name, parameters in load("surface")["command line"].items() if "--json, flag" in parameters}
    recorded = {*load("schemas"), "plan", "doctor run"}
    assert {name for name in with_json if not any(each.startswith(name) for each in recorded)} == set()
    assert load("schemas").keys() == {*outputs.QUICK, *outputs.WHOLE}


def test_plans_are_chosen_and_predicted_as_recorded():
    golden = load("plan_outputs")
    assert golden.keys() == outputs.PLANS.keys()
    for name, arguments in outputs.PLANS.items():
        assert outputs.value_differences(outputs.plan_output(arguments), golden[name], name) == []


@pytest.mark.parametrize("name", outputs.QUICK)
def test_json_output_has_the_recorded_keys(name):
    code, found = check_keys(name, outputs.QUICK[name])
    if name == "verify":
        assert code == 0
        assert [(verdict["plan"], verdict["status"]) for verdict in found["verdicts"]] == [
            ("ddp", "passed"),
            ("zero3", "passed"),
        ]


@pytest.mark.prove
@pytest.mark.parametrize("name", outputs.WHOLE)
def test_json_output_of_a_command_that_measures_has_the_recorded_keys(name):
    check_keys(name, outputs.WHOLE[name])
