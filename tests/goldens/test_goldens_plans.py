"""Plan files of version 1 are read as the first edition meant them."""

import tomllib

import pytest

import shardwise as sw
from goldens import plans
from goldens.entry import plan_from_toml, plan_to_toml


def read(name):
    return plan_from_toml((plans.FOLDER / f"{name}.toml").read_text(), f"{name}.toml")


def test_every_plan_file_of_version_1_has_a_test():
    files = {path.stem for path in plans.FOLDER.glob("*.toml")}
    assert files == {*plans.PRESETS, plans.EVERY_KEY}


@pytest.mark.parametrize("name", plans.PRESETS)
def test_a_plan_file_of_version_1_is_the_preset_it_was_written_from(name):
    assert read(name) == plans.preset(name)
    assert plan_from_toml(plan_to_toml(read(name)), "again.toml") == read(name)


def test_every_key_of_a_plan_file_of_version_1_is_read():
    """Without a line, the plan is another one or is refused; written and read again, it is the same."""
    whole = read(plans.EVERY_KEY)
    assert plan_from_toml(plan_to_toml(whole), "again.toml") == whole
    lines = (plans.FOLDER / f"{plans.EVERY_KEY}.toml").read_text().splitlines()
    settings = [line for line in lines if " = " in line]
    recorded = tomllib.loads((plans.FOLDER / "ddp.toml").read_text())
    assert len(settings) == sum(len(part) if isinstance(part, dict) else 1 for part in recorded.values())
    for setting in settings:
        text = "\n".join(line for line in lines if line != setting)
        try:
            plan = plan_from_toml(text, "shorter.toml")
        except sw.ShardwiseError:
            continue
        assert plan != whole, f"{setting} changes nothing"
