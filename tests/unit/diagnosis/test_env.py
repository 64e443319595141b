"""The lint of variables: every rule with variables that pass it and ones that do not."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from shardwise.diagnosis.env_rules import RULES, EnvironmentFacts, explain_variables, lint

NODE = EnvironmentFacts(
    interfaces=("lo", "eth0", "docker0"), has_rdma=True, num_gpus=8, uses_nccl=True, nproc=8, cores=64, uses_ddp=True
)
LAPTOP = EnvironmentFacts(interfaces=("lo", "wlan0"), num_gpus=0, uses_nccl=False, nproc=2, cores=4)
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
RANKED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}

# rule, variables, surroundings, the variable blamed (None: all is well), state, words
CASES = [
    ("detail_with_ddp_on_gloo", DETAIL, LAPTOP, "TORCH_DISTRIBUTED_DEBUG", "fail", "SIGSEGV"),
    ("detail_with_ddp_on_gloo", DETAIL, NODE, None, "", ""),
    ("detail_with_ddp_on_gloo", DETAIL, replace(LAPTOP, uses_ddp=False), None, "", ""),
    ("detail_with_ddp_on_gloo", {"TORCH_DISTRIBUTED_DEBUG": "INFO"}, LAPTOP, None, "", ""),
    ("interface_is_here", {"NCCL_SOCKET_IFNAME": "ib0"}, NODE, "NCCL_SOCKET_IFNAME", "fail", "ib0 matches no"),
    ("interface_is_here", {"NCCL_SOCKET_IFNAME": "ib0"}, LAPTOP, "NCCL_SOCKET_IFNAME", "warn", "ib0 matches no"),
    ("interface_is_here", {"NCCL_SOCKET_IFNAME": "^docker,lo"}, NODE, None, "", ""),
    ("interface_is_here", {"GLOO_SOCKET_IFNAME": "eth"}, NODE, "GLOO_SOCKET_IFNAME", "fail", "eth is not an interface"),
    ("interface_is_here", {"GLOO_SOCKET_IFNAME": "^docker0"}, NODE, "GLOO_SOCKET_IFNAME", "fail", "exact names"),
    ("interface_is_here", {"GLOO_SOCKET_IFNAME": "eth0,lo"}, NODE, None, "", ""),
    ("infiniband_is_wanted", {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"}, NODE, "NCCL_IB_HCA", "warn", "no effect"),
    (
        "infiniband_is_wanted",
        {"NCCL_IB_DISABLE": "1", "NCCL_NET_GDR_LEVEL": "2"},
        NODE,
        "NCCL_NET_GDR_LEVEL",
        "warn",
        "no",
    ),
    ("infiniband_is_wanted", {"NCCL_NET_GDR_LEVEL": "2"}, LAPTOP, "NCCL_NET_GDR_LEVEL", "warn", "no InfiniBand"),
    ("infiniband_is_wanted", {"NCCL_IB_DISABLE": "1", "NCCL_NET": "IB"}, NODE, "NCCL_NET", "fail", "turns it off"),
    ("infiniband_is_wanted", {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "mlx5", "NCCL_NET": "IB"}, NODE, None, "", ""),
    ("infiniband_is_wanted", {"NCCL_IB_DISABLE": "1"}, NODE, None, "", ""),
    (
        "local_paths_are_open",
        {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
        NODE,
        "NCCL_P2P_DISABLE",
        "warn",
        "network",
    ),
    ("local_paths_are_open", {"NCCL_P2P_DISABLE": "1"}, NODE, None, "", ""),
    (
        "sockets_fit",
        {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"},
        NODE,
        "NCCL_NSOCKS_PERTHREAD",
        "warn",
        "64",
    ),
    ("sockets_fit", {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2"}, NODE, None, "", ""),
    ("threads_fit", {"OMP_NUM_THREADS": "16"}, NODE, "OMP_NUM_THREADS", "warn", "16 threads x 8 ranks on 64"),
    ("threads_fit", {"MKL_NUM_THREADS": "16"}, NODE, "MKL_NUM_THREADS", "warn", "16 threads"),
    ("threads_fit", {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "4"}, NODE, None, "", ""),
    ("ranks_agree", {"RANK": "0"}, NODE, "RANK", "fail", "WORLD_SIZE is not"),
    ("ranks_agree", {"RANK": "4", "WORLD_SIZE": "4"}, NODE, "RANK", "fail", "not below"),
    ("ranks_agree", {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, NODE, "RANK", "warn", "rank 0 of 4"),
    (
        "ranks_agree",
        {**RANKED, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        NODE,
        "MASTER_ADDR",
        "fail",
        "every node",
    ),
    ("ranks_agree", {**RANKED, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}, NODE, None, "", ""),
    ("one_launch_queue", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, NODE, "CUDA_DEVICE_MAX_CONNECTIONS", "warn", "FSDP"),
    ("one_launch_queue", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, NODE, None, "", ""),
    ("gpus_are_there", {"CUDA_VISIBLE_DEVICES": "0,8"}, NODE, "CUDA_VISIBLE_DEVICES", "warn", "8 is not a GPU"),
    ("gpus_are_there", {"CUDA_VISIBLE_DEVICES": "1,1"}, NODE, "CUDA_VISIBLE_DEVICES", "warn", "twice"),
    ("gpus_are_there", {"CUDA_VISIBLE_DEVICES": ""}, NODE, "CUDA_VISIBLE_DEVICES", "warn", "hides all 8"),
    ("gpus_are_there", {"CUDA_VISIBLE_DEVICES": "0,7"}, NODE, None, "", ""),
    ("gpus_are_there", {"CUDA_VISIBLE_DEVICES": "GPU-8f,GPU-9e"}, NODE, None, "", ""),
    ("kernels_run_ahead", {"CUDA_LAUNCH_BLOCKING": "1"}, NODE, "CUDA_LAUNCH_BLOCKING", "warn", "slow"),
    ("kernels_run_ahead", {"CUDA_LAUNCH_BLOCKING": "0"}, NODE, None, "", ""),
    (
        "names_agree",
        {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"},
        NODE,
        "TORCH_NCCL_BLOCKING_WAIT",
        "warn",
        "wins",
    ),
    (
        "names_agree",
        {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        NODE,
        "TORCH_NCCL_BLOCKING_WAIT",
        "warn",
        "beside",
    ),
    ("names_agree", {"TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_BLOCKING_WAIT": "1"}, NODE, None, "", ""),
    (
        "dump_has_a_buffer",
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"},
        NODE,
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "warn",
        "nothing",
    ),
    ("dump_has_a_buffer", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, NODE, None, "", ""),
    ("log_files_differ", {"NCCL_DEBUG_FILE": "/tmp/nccl.log"}, NODE, "NCCL_DEBUG_FILE", "warn", "8 ranks"),
    ("log_files_differ", {"NCCL_DEBUG_FILE": "/tmp/nccl.%h.%p"}, NODE, None, "", ""),
    ("nccl_is_used", {"NCCL_BUFFSIZE": "4194304", "NCCL_DEBUG": "INFO"}, LAPTOP, "NCCL", "warn", "and 1 more ignored"),
    ("nccl_is_used", {"NCCL_BUFFSIZE": "4194304"}, NODE, None, "", ""),
]
BY_NAME = {rule.__name__: rule for rule in RULES}


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}: {case[1]}" for case in CASES])
def test_a_rule_speaks_when_it_should_and_only_then(case):
    rule, environ, here, blamed, state, words = case
    found = list(BY_NAME[rule](environ, here))
    assert [(verdict.name, verdict.state) for verdict in found] == ([(blamed, state)] if blamed else [])
    assert all(words in verdict.fact and verdict.fix for verdict in found)


def test_every_rule_has_variables_that_pass_and_ones_that_do_not():
    assert {case[0] for case in CASES if case[3]} == {case[0] for case in CASES if not case[3]} == set(BY_NAME)


def test_no_variable_is_no_finding():
    assert explain_variables({"HOME": "/root", "PATH": "/bin"}) == []
    assert lint({"HOME": "/root"}, LAPTOP) == []


@pytest.mark.parametrize(
    ("name", "value", "state", "words", "fix"),
    [
        ("NCCL_BUFFSIZE", "4194304", "ok", "bytes of each buffer", ""),
        ("NCCL_DEBUG", "loud", "warn", "not one of its own", "VERSION, WARN, INFO"),
        ("NCCL_IB_DISBLE", "1", "warn", "no library reads", "NCCL_IB_DISABLE"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "warn", "old name", "use TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("NCCL_IB_CUDA_SUPPORT", "1", "warn", "any more", "use NCCL_NET_GDR_LEVEL"),
        ("NCCL_IB_PKEY", "1", "ok", "not judged", ""),
        ("OMP_NUM_THREADS", "", "ok", "(empty)", ""),
    ],
)
def test_every_variable_that_is_set_is_explained(name, value, state, words, fix):
    [verdict] = explain_variables({name: value})
    assert (verdict.name, verdict.state) == (name, state)
    assert words in verdict.fact
    assert fix in verdict.fix


def test_the_gravest_findings_come_first():
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert [verdict.state for verdict in lint(environ, NODE)] == ["fail", "warn", "warn"]


def test_the_command_ends_with_three_when_variables_cannot_work():
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "nowhere0"}
    command = [sys.executable, "-m", "shardwise", "doctor", "env"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "nowhere0 is not an interface of this machine" in done.stdout
