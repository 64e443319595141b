"""Checkpoints and run directories of version 1 stay readable: trainings resume from them, doctor reads them."""

import json
import math
import shutil

import pytest

from goldens import checkpoints, runs
from goldens.entry import command
from goldens.outputs import value_differences
from goldens.store import WEIGHT_TOLERANCE, load, needs_recorded_versions, weight_differences

QUICK_PAIRS = {"zero3": ["one", "tp2"], "pp": ["zero3-2"]}
WHOLE_PAIRS = {preset: list(checkpoints.LAYOUTS) for preset in ("ddp", "zero1", "zero3", "tp", "pp")}
"""Plan on two ranks: the checkpoints that training resumes from."""


def check_resumed(found):
    golden = load("resumed")
    for name, result in found.items():
        assert result["first step"] == checkpoints.SAVED_AT, name
        for loss, recorded in zip(result["losses"], golden["losses"][checkpoints.SAVED_AT :], strict=True):
            assert math.isclose(loss, recorded, rel_tol=1e-9), name
        assert weight_differences(result["weights"], golden["weights"], WEIGHT_TOLERANCE["fp64"]) == [], name


def test_one_process_resumes_from_every_checkpoint_of_version_1(tmp_path):
    needs_recorded_versions()
    found = checkpoints.resume_all(tmp_path, list(checkpoints.LAYOUTS), "ddp", 1)
    assert found.keys() == checkpoints.LAYOUTS.keys()
    check_resumed(found)


@pytest.mark.parametrize(
    "plans", [QUICK_PAIRS, pytest.param(WHOLE_PAIRS, marks=pytest.mark.prove)], ids=["slice", "whole"]
)
def test_two_ranks_resume_from_checkpoints_of_other_layouts(tmp_path, plans):
    needs_recorded_versions()
    for preset, names in plans.items():
        check_resumed(checkpoints.resume_all(tmp_path, names, preset, 2))


@pytest.mark.parametrize("name", checkpoints.LAYOUTS)
def test_a_checkpoint_of_version_1_is_inspected_and_checked(tmp_path, name):
    path = checkpoints.FOLDER / name
    assert json.loads((path / "manifest.json").read_text())["version"] == 1
    code, shown = command("checkpoint", "inspect", path, "--tensors")
    assert code == 0
    assert "blocks.1.attn.qkv.weight" in shown
    assert command("checkpoint", "check", path)[0] == 0
    damaged = tmp_path / "step-00000003"
    shutil.copytree(path, damaged)
    shard = damaged / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    assert command("checkpoint", "check", damaged)[0] == 3


def test_run_directories_of_version_1_are_read_as_recorded(tmp_path):
    golden, found = load("run_readings"), runs.readings(tmp_path)
    assert found.keys() == golden.keys() == runs.JOBS.keys()
    assert value_differences(found, golden) == []


@pytest.mark.parametrize("name", ["killed", "error"])
def test_the_cause_of_a_recorded_failure_names_its_rank(tmp_path, name):
    path = runs.unpack(tmp_path)[name]
    _, text = command("doctor", "run", path, "--json")
    [cause] = [verdict for verdict in json.loads(text)["verdicts"] if verdict["state"] == "fail"]
    assert "rank 1" in cause["fact"]
    assert command("watch", path, "--once")[0] == 0
