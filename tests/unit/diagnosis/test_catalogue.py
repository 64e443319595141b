"""The catalogue of variables and the presets: whole, consistent, and with the guide's values that the lint approves."""

import re
import subprocess
import sys

import pytest

from refusals import refuses
from shardwise.diagnosis.catalogue import FAMILIES, find_preset, read_catalogue, read_presets
from shardwise.diagnosis.env import EnvironmentFacts, explain_variables, lint

GUIDE_WITHOUT_INFINIBAND = {
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "2",
    "NCCL_BUFFSIZE": "4194304",
}
GUIDE_LEFT_OUT = {"OMP_NUM_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
GUIDE_WITH_INFINIBAND = {"NCCL_IB_DISABLE": "0", "NCCL_NET_GDR_LEVEL": "2", "NCCL_SOCKET_IFNAME": "ib0"}
GUIDE_PER_RANK = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}


def test_every_variable_has_a_meaning_and_a_source_that_is_named():
    catalogue = read_catalogue()
    assert len(catalogue.variables) > 200
    assert [
        name
        for name, known in catalogue.variables.items()
        if not known.meaning or known.source not in catalogue.sources
    ] == []


def test_every_source_is_used():
    catalogue = read_catalogue()
    assert {known.source for known in catalogue.variables.values()} == set(catalogue.sources)


def test_what_is_gone_names_what_to_use():
    known = read_catalogue().variables
    assert [
        name for name, one in known.items() if bool(one.state) != (one.use in known and not known[one.use].state)
    ] == []


def test_what_can_be_chosen_is_listed_and_lists_belong_to_choices():
    known = read_catalogue().variables
    choosing = {"choice", "choices", "level"}
    assert [name for name, one in known.items() if (one.kind in choosing) != bool(one.values)] == []


def test_the_lint_looks_at_all_but_paths_of_the_catalogue():
    known = read_catalogue().variables
    assert {name for name in known if not FAMILIES.fullmatch(name)} == {"CUDA_CACHE_PATH", "CUDA_HOME"}


def test_undocumented_names_are_not_explained():
    catalogue = read_catalogue()
    assert not catalogue.undocumented & set(catalogue.variables)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("NCCL_IB_DISABLE", ["0", "1", "true"], ["yes", "2", ""]),
        ("NCCL_SOCKET_NTHREADS", ["1", "16"], ["0", "17", "many", ""]),
        ("NCCL_DEBUG", ["INFO", "warn"], ["verbose"]),
        ("NCCL_DEBUG_SUBSYS", ["INIT,NET", "ALL,^GRAPH"], ["NETWORK"]),
        ("NCCL_NET_GDR_LEVEL", ["2", "PHB"], ["FAR"]),
        ("NCCL_IB_GID_INDEX", ["-1", "3"], ["x"]),
        ("MASTER_PORT", ["29500"], ["0", "70000"]),
        ("NCCL_DEBUG_FILE", ["/tmp/x.%h.%p"], []),
    ],
)
def test_a_variable_knows_its_values(name, good, bad):
    known = read_catalogue().variables[name]
    assert [value for value in good if known.allowed_values(value)] == []
    assert [value for value in bad if not known.allowed_values(value)] == []


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("NCCL_IB_DISBLE", "NCCL_IB_DISABLE"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("TORCH_DISTRIBUTED_DEBGU", "TORCH_DISTRIBUTED_DEBUG"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("NCCL_IB_PKEY", ""),  # read by NCCL, in no guide
        ("NCCL_IB_HCA", ""),
        ("NCCL_SOMETHING_NEW_AND_LONG", ""),
    ],
)
def test_misspelled_names_are_recognised(wrong, meant):
    assert read_catalogue().correct_spelling(wrong) == meant


def test_presets_set_known_variables_to_values_they_take():
    known = read_catalogue().variables
    wrong = [
        (name, key)
        for name, preset in read_presets().items()
        for key, value in preset.variables.items()
        if key not in known or known[key].state or known[key].allowed_values(value)
    ]
    assert wrong == []
    assert set(read_presets()) == {"gcp", "infiniband", "aws-efa", "azure-nd", "workstation"}


def test_presets_have_every_value_of_the_guide_that_the_lint_does_not_advise_against():
    assert find_preset("gcp").variables == GUIDE_WITHOUT_INFINIBAND
    assert GUIDE_WITH_INFINIBAND.items() <= find_preset("infiniband").variables.items()
    assert all(set(preset.per_rank) == GUIDE_PER_RANK for preset in read_presets().values())
    assert not any(GUIDE_PER_RANK & set(preset.variables) for preset in read_presets().values())


PLACES = {
    "gcp": {},
    "infiniband": {"interfaces": ("lo", "eth0", "ib0"), "has_rdma": True},
    "aws-efa": {"has_rdma": True},
    "azure-nd": {"has_rdma": True},
    "workstation": {},
}
"""What a machine that a preset is for has, besides what all of them have."""


@pytest.mark.parametrize("name", PLACES)
def test_the_lint_advises_against_nothing_that_a_preset_sets(name):
    common = {"interfaces": ("lo", "eth0"), "num_gpus": 8, "uses_nccl": True, "nproc": 8, "cores": 16}
    here = EnvironmentFacts(**common | PLACES[name])
    variables = find_preset(name).variables
    verdicts = explain_variables(variables) + lint(variables, here)
    assert [each for each in verdicts if each.state != "ok"] == []
    with_all_of_the_guide = lint(find_preset("gcp").variables | GUIDE_LEFT_OUT, here)
    assert GUIDE_LEFT_OUT.keys() <= {each.name for each in with_all_of_the_guide}


def test_efa_is_not_infiniband_and_the_preset_reports_it():
    preset = find_preset("aws-efa")
    assert not [name for name in preset.variables if "_IB_" in name]
    assert "Its network is EFA" in " ".join(preset.notes)


def test_the_users_own_variables_win():
    preset, own = find_preset("gcp"), {"NCCL_DEBUG": "WARN", "NCCL_BUFFSIZE": "4194304", "HOME": "/root"}
    assert preset.missing_from(own).keys() == GUIDE_WITHOUT_INFINIBAND.keys() - own.keys()
    assert preset.overridden_by(own) == {"NCCL_DEBUG": "WARN"}


def test_unknown_presets_are_refused_with_the_names():
    with refuses("doctor.unknown-preset", "gcp, infiniband, aws-efa"):
        find_preset("aws")


@pytest.mark.parametrize("name", ["gcp", "aws-efa"])
def test_exported_lines_mean_the_preset_in_a_shell(name):
    command = [sys.executable, "-m", "shardwise", "doctor", "env", "--preset", name, "--export"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    done = subprocess.run(
        ["env", "-i", "bash", "-c", f"{lines}\n/usr/bin/env"], capture_output=True, text=True, check=True
    )
    found = dict(re.findall(r"^(\w+)=(.*)$", done.stdout, re.MULTILINE))
    assert find_preset(name).variables.items() <= found.items()
    assert not GUIDE_PER_RANK & set(found)
