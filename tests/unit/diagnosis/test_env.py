"""The lint of environment variables: every rule with variables that pass and variables that fail."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from shardwise.diagnosis.env import RULES, EnvironmentFacts, explain_variables, lint

NODE = EnvironmentFacts(
    interfaces=("lo", "eth0", "docker0"), has_rdma=True, num_gpus=8, uses_nccl=True, nproc=8, cores=64, uses_ddp=True
)
LAPTOP = EnvironmentFacts(interfaces=("lo", "wlan0"), num_gpus=0, uses_nccl=False, nproc=2, cores=4)
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
RANKED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}

# rule, variables, machine, the variable named (None: nothing is found), state, text
CASES = [
    ("detail_with_ddp_on_gloo", DETAIL, LAPTOP, "TORCH_DISTRIBUTED_DEBUG", "fail", "SIGSEGV"),
    ("detail_with_ddp_on_gloo", DETAIL, NODE, None, "", ""),
    ("detail_with_ddp_on_gloo", DETAIL, replace(LAPTOP, uses_ddp=False), None, "", ""),
    ("detail_with_ddp_on_gloo", {"TORCH_DISTRIBUTED_DEBUG": "INFO"}, LAPTOP, None, "", ""),
    ("interface_exists", {"NCCL_SOCKET_IFNAME": "ib0"}, NODE, "NCCL_SOCKET_IFNAME", "fail", "ib0 does not match"),
    ("interface_exists", {"NCCL_SOCKET_IFNAME": "ib0"}, LAPTOP, "NCCL_SOCKET_IFNAME", "warn", "ib0 does not match"),
    ("interface_exists", {"NCCL_SOCKET_IFNAME": "^docker,lo"}, NODE, None, "", ""),
    ("interface_exists", {"GLOO_SOCKET_IFNAME": "eth"}, NODE, "GLOO_SOCKET_IFNAME", "fail", "eth is not an interface"),
    ("interface_exists", {"GLOO_SOCKET_IFNAME": "^docker0"}, NODE, "GLOO_SOCKET_IFNAME", "fail", "exact names"),
    ("interface_exists", {"GLOO_SOCKET_IFNAME": "eth0,lo"}, NODE, None, "", ""),
    (
        "infiniband_settings_apply",
        {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"},
        NODE,
        "NCCL_IB_HCA",
        "warn",
        "disables NCCL_IB_HCA",
    ),
    (
        "infiniband_settings_apply",
        {"NCCL_IB_DISABLE": "1", "NCCL_NET_GDR_LEVEL": "2"},
        NODE,
        "NCCL_NET_GDR_LEVEL",
        "warn",
        "disables NCCL_NET_GDR_LEVEL",
    ),
    ("infiniband_settings_apply", {"NCCL_NET_GDR_LEVEL": "2"}, LAPTOP, "NCCL_NET_GDR_LEVEL", "warn", "no InfiniBand"),
    (
        "infiniband_settings_apply",
        {"NCCL_IB_DISABLE": "1", "NCCL_NET": "IB"},
        NODE,
        "NCCL_NET",
        "fail",
        "contradicts NCCL_IB_DISABLE=1",
    ),
    (
        "infiniband_settings_apply",
        {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "mlx5", "NCCL_NET": "IB"},
        NODE,
        None,
        "",
        "",
    ),
    ("infiniband_settings_apply", {"NCCL_IB_DISABLE": "1"}, NODE, None, "", ""),
    (
        "local_transports_are_enabled",
        {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
        NODE,
        "NCCL_P2P_DISABLE",
        "warn",
        "network",
    ),
    ("local_transports_are_enabled", {"NCCL_P2P_DISABLE": "1"}, NODE, None, "", ""),
    (
        "socket_count_is_valid",
        {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"},
        NODE,
        "NCCL_NSOCKS_PERTHREAD",
        "warn",
        "64",
    ),
    ("socket_count_is_valid", {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2"}, NODE, None, "", ""),
    (
        "thread_count_fits_cores",
        {"OMP_NUM_THREADS": "16"},
        NODE,
        "OMP_NUM_THREADS",
        "warn",
        "16 threads x 8 ranks oversubscribe 64",
    ),
    ("thread_count_fits_cores", {"MKL_NUM_THREADS": "16"}, NODE, "MKL_NUM_THREADS", "warn", "16 threads"),
    ("thread_count_fits_cores", {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "4"}, NODE, None, "", ""),
    ("rank_variables_are_consistent", {"RANK": "0"}, NODE, "RANK", "fail", "WORLD_SIZE is not"),
    ("rank_variables_are_consistent", {"RANK": "4", "WORLD_SIZE": "4"}, NODE, "RANK", "fail", "must be below"),
    (
        "rank_variables_are_consistent",
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
        NODE,
        "RANK",
        "warn",
        "rank 0 of 4",
    ),
    (
        "rank_variables_are_consistent",
        {**RANKED, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        NODE,
        "MASTER_ADDR",
        "fail",
        "each of the 2 nodes",
    ),
    ("rank_variables_are_consistent", {**RANKED, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}, NODE, None, "", ""),
    ("single_launch_queue", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, NODE, "CUDA_DEVICE_MAX_CONNECTIONS", "warn", "FSDP"),
    ("single_launch_queue", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, NODE, None, "", ""),
    ("visible_gpus_exist", {"CUDA_VISIBLE_DEVICES": "0,8"}, NODE, "CUDA_VISIBLE_DEVICES", "warn", "8 is not a GPU"),
    ("visible_gpus_exist", {"CUDA_VISIBLE_DEVICES": "1,1"}, NODE, "CUDA_VISIBLE_DEVICES", "warn", "twice"),
    ("visible_gpus_exist", {"CUDA_VISIBLE_DEVICES": ""}, NODE, "CUDA_VISIBLE_DEVICES", "warn", "hides all 8"),
    ("visible_gpus_exist", {"CUDA_VISIBLE_DEVICES": "0,7"}, NODE, None, "", ""),
    ("visible_gpus_exist", {"CUDA_VISIBLE_DEVICES": "GPU-8f,GPU-9e"}, NODE, None, "", ""),
    ("debug_settings_are_off", {"CUDA_LAUNCH_BLOCKING": "1"}, NODE, "CUDA_LAUNCH_BLOCKING", "warn", "slow"),
    ("debug_settings_are_off", {"CUDA_LAUNCH_BLOCKING": "0"}, NODE, None, "", ""),
    (
        "renamed_variables_agree",
        {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"},
        NODE,
        "TORCH_NCCL_BLOCKING_WAIT",
        "warn",
        "reads the new name",
    ),
    (
        "renamed_variables_agree",
        {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        NODE,
        "TORCH_NCCL_BLOCKING_WAIT",
        "warn",
        "contradicts",
    ),
    ("renamed_variables_agree", {"TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_BLOCKING_WAIT": "1"}, NODE, None, "", ""),
    (
        "flight_recorder_has_a_buffer",
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"},
        NODE,
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "warn",
        "size 0",
    ),
    ("flight_recorder_has_a_buffer", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, NODE, None, "", ""),
    ("log_files_are_per_rank", {"NCCL_DEBUG_FILE": "/tmp/nccl.log"}, NODE, "NCCL_DEBUG_FILE", "warn", "8 ranks"),
    ("log_files_are_per_rank", {"NCCL_DEBUG_FILE": "/tmp/nccl.%h.%p"}, NODE, None, "", ""),
    (
        "nccl_is_used",
        {"NCCL_BUFFSIZE": "4194304", "NCCL_DEBUG": "INFO"},
        LAPTOP,
        "NCCL",
        "warn",
        "NCCL_BUFFSIZE and 1 more",
    ),
    ("nccl_is_used", {"NCCL_BUFFSIZE": "4194304"}, NODE, None, "", ""),
]
BY_NAME = {rule.__name__: rule for rule in RULES}


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}: {case[1]}" for case in CASES])
def test_a_rule_reports_only_invalid_variables(case):
    rule, environ, machine, named, state, text = case
    found = list(BY_NAME[rule](environ, machine))
    assert [(verdict.name, verdict.state) for verdict in found] == ([(named, state)] if named else [])
    assert all(text in verdict.fact and verdict.fix for verdict in found)


def test_every_rule_has_cases_that_pass_and_cases_that_fail():
    assert {case[0] for case in CASES if case[3]} == {case[0] for case in CASES if not case[3]} == set(BY_NAME)


def test_other_variables_are_not_reported():
    assert explain_variables({"HOME": "/root", "PATH": "/bin"}) == []
    assert lint({"HOME": "/root"}, LAPTOP) == []


@pytest.mark.parametrize(
    ("name", "value", "state", "text", "fix"),
    [
        ("NCCL_BUFFSIZE", "4194304", "ok", "bytes of each buffer", ""),
        ("NCCL_DEBUG", "loud", "warn", "value is invalid", "VERSION, WARN, INFO"),
        ("NCCL_IB_DISBLE", "1", "warn", "no library reads", "NCCL_IB_DISABLE"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "warn", "deprecated", "use TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("NCCL_IB_CUDA_SUPPORT", "1", "warn", "any more", "use NCCL_NET_GDR_LEVEL"),
        ("NCCL_IB_PKEY", "1", "ok", "not checked", ""),
        ("OMP_NUM_THREADS", "", "ok", "(empty)", ""),
    ],
)
def test_every_variable_that_is_set_is_explained(name, value, state, text, fix):
    [verdict] = explain_variables({name: value})
    assert (verdict.name, verdict.state) == (name, state)
    assert text in verdict.fact
    assert fix in verdict.fix


def test_failures_precede_warnings():
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert [verdict.state for verdict in lint(environ, NODE)] == ["fail", "warn", "warn"]


def test_the_command_exits_with_three_if_a_check_fails():
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "nowhere0"}
    command = [sys.executable, "-m", "shardwise", "doctor", "env"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "nowhere0 is not an interface of this machine" in done.stdout
