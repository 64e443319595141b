"""Who a rank is under each launcher, which variables are refused, and what a launched rank is given."""

import os
import subprocess
import sys

import pytest

from refusals import refuses
from shardwise.environment import (
    DERIVED_PORTS,
    Identity,
    adopt,
    cache_directory,
    config_directory,
    expand_hosts,
    has_own_gpu,
    identify,
    master_endpoint,
    rank_environment,
    visible_cuda_devices,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-n0-4242@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def test_nothing_set_is_a_world_of_one():
    assert identify({}) == Identity(source="alone", world_size=1, rank=0)


def test_torchrun_is_read_whole():
    assert identify(TORCHRUN) == Identity(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        num_nodes=2,
        source="torchrun",
        master_addr="n0",
        master_port=29400,
    )


def test_hand_exported_rank_without_local_rank_assumes_one_node():
    identity = identify({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert (identity.local_rank, identity.local_world_size, identity.num_nodes) == (1, 2, 1)
    assert identity.local_rank_assumed


def test_hand_exported_local_place_gives_the_node():
    identity = identify(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"))
    assert (identity.node_rank, identity.num_nodes, identity.local_rank_assumed) == (1, 2, False)


def test_deepspeed_calls_the_local_world_size_local_size():
    identity = identify({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"})
    assert (identity.local_world_size, identity.node_rank, identity.num_nodes) == (2, 1, 2)


def test_hand_exported_rank_in_an_srun_step_takes_its_place_from_slurm():
    identity = identify(SLURM | {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n07", "MASTER_PORT": "1"})
    assert (identity.source, identity.local_rank, identity.node_rank, identity.num_nodes) == ("torchrun", 1, 1, 2)


def test_torchrun_with_one_agent_per_task_is_accepted():
    step = SLURM | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert identify(step | TORCHRUN).rank == 5


def test_torchrun_inside_a_single_task_is_accepted():
    step = SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert identify(step | TORCHRUN).world_size == 8


def test_slurm_is_read_whole():
    identity = identify(SLURM)
    assert identity.master_port in DERIVED_PORTS
    assert identity == Identity(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        source="slurm",
        master_addr="n07",
        master_port=identity.master_port,
    )


def test_slurm_on_one_node_joins_on_loopback():
    assert identify(SLURM | {"SLURM_STEP_NODELIST": "n07", "SLURM_NODEID": "0"}).master_addr == "127.0.0.1"


def test_slurm_ports_are_the_same_for_every_task_and_differ_between_steps():
    port = identify(SLURM).master_port
    assert identify(SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).master_port == port
    assert identify(SLURM | {"SLURM_STEP_ID": "1"}).master_port != port


@pytest.mark.parametrize("environ", [SLURM, OPENMPI, HYDRA], ids=["slurm", "openmpi", "pmi"])
def test_a_given_master_wins_over_the_derived_one(environ):
    identity = identify(environ | {"MASTER_ADDR": "boss", "MASTER_PORT": "1234"})
    assert (identity.master_addr, identity.master_port) == ("boss", 1234)


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"], ids=["none", "batch", "interactive"])
def test_a_slurm_shell_outside_a_step_is_alone(step):
    shell = without(SLURM, "SLURM_STEP_ID") | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert identify(shell | ({} if step is None else {"SLURM_STEP_ID": step})).source == "alone"


@pytest.mark.parametrize(("text", "node", "count"), [("2(x2)", 1, 2), ("3,1", 0, 3), ("3,1", 1, 1), ("1(x3),4", 3, 4)])
def test_slurm_tasks_per_node_give_the_local_world_size(text, node, count):
    environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
    assert identify(environ).local_world_size == count


def test_openmpi_is_read_whole():
    identity = identify(OPENMPI)
    assert identity.master_port in DERIVED_PORTS
    assert identity == Identity(
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        source="openmpi",
        master_addr="127.0.0.1",
        master_port=identity.master_port,
    )


def test_openmpi_4_names_its_job_by_a_number():
    environ = without(OPENMPI, "PMIX_NAMESPACE") | {"OMPI_MCA_ess_base_jobid": "2016018433"}
    assert identify(environ).master_port in DERIVED_PORTS


def test_openmpi_on_several_nodes_works_with_a_master():
    identity = identify(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "MASTER_ADDR": "n0"})
    assert (identity.node_rank, identity.num_nodes, identity.master_addr) == (1, 2, "n0")


def test_openmpi_on_several_nodes_of_slurm_joins_on_the_first():
    several = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "SLURM_JOB_NODELIST": "n[07-08]"}
    assert identify(OPENMPI | several).master_addr == "n07"


def test_mpirun_inside_slurm_is_openmpi():
    # mpirun starts one daemon per node by srun: every rank inherits the daemon's SLURM variables
    assert identify(SLURM | OPENMPI).source == "openmpi"


def test_hydra_is_read_as_pmi():
    identity = identify(HYDRA)
    assert (identity.source, identity.rank, identity.local_world_size) == ("pmi", 1, 2)
    assert (identity.master_addr, identity.master_port) == ("127.0.0.1", 29500)


def test_srun_with_pmi2_is_slurm():
    assert identify(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}).source == "slurm"


REFUSED = {
    "world size without rank": ({"WORLD_SIZE": "2"}, ("env.rank-missing", "WORLD_SIZE=2", "export RANK")),
    "rank without world size": ({"RANK": "0"}, ("env.world-size-missing", "RANK=0", "export WORLD_SIZE")),
    "rank beyond the world": ({"RANK": "2", "WORLD_SIZE": "2"}, ("env.rank-too-large", "RANK=2", "WORLD_SIZE=2")),
    "empty world": ({"RANK": "0", "WORLD_SIZE": "0"}, ("env.world-size-zero", "WORLD_SIZE=0")),
    "rank is not a number": ({"RANK": "one", "WORLD_SIZE": "2"}, ("env.not-whole-number", "RANK='one'")),
    "negative rank": ({"RANK": "-1", "WORLD_SIZE": "2"}, ("env.not-whole-number", "RANK='-1'")),
    "port is not a number": (TORCHRUN | {"MASTER_PORT": "http"}, ("env.not-whole-number", "MASTER_PORT='http'")),
    "port beyond 16 bits": (TORCHRUN | {"MASTER_PORT": "70000"}, ("env.port-invalid", "MASTER_PORT=70000")),
    "local rank beyond its node": (
        TORCHRUN | {"LOCAL_RANK": "4"},
        ("env.local-rank-too-large", "LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"),
    ),
    "node larger than the world": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "9"},
        ("env.local-size-too-large", "LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"),
    ),
    "several nodes of unknown size": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        ("env.local-size-missing", "LOCAL_WORLD_SIZE"),
    ),
    "agents against tasks": (SLURM | TORCHRUN, ("env.slurm-agents-mismatch", 4, 2)),
    "world size against tasks": (
        SLURM | {"RANK": "0", "WORLD_SIZE": "2"},
        ("env.slurm-rank-mismatch", 4, "WORLD_SIZE=2"),
    ),
    "rank against task": (
        SLURM | {"RANK": "0", "WORLD_SIZE": "4"},
        ("env.slurm-rank-mismatch", "SLURM_PROCID=3", "RANK=0"),
    ),
    "slurm task beyond the step": (SLURM | {"SLURM_PROCID": "4"}, ("env.rank-too-large", "SLURM_PROCID=4")),
    "slurm without local id": (without(SLURM, "SLURM_LOCALID"), ("env.variable-missing", "SLURM_LOCALID")),
    "slurm list with an open bracket": (
        SLURM | {"SLURM_STEP_NODELIST": "n[0-1"},
        ("env.slurm-nodelist-syntax", "'n[0-1'"),
    ),
    "slurm list with a bad range": (SLURM | {"SLURM_STEP_NODELIST": "n[0-]"}, ("env.slurm-nodelist-syntax", "'n[0-]'")),
    "openmpi without a size": (
        without(OPENMPI, "OMPI_COMM_WORLD_SIZE"),
        ("env.world-size-missing", "OMPI_COMM_WORLD_SIZE"),
    ),
    "pmi without a local rank": (without(HYDRA, "MPI_LOCALRANKID"), ("env.variable-missing", "MPI_LOCALRANKID")),
}


@pytest.mark.parametrize(("environ", "refusal"), REFUSED.values(), ids=REFUSED.keys())
def test_contradictions_are_refused_by_name(environ, refusal):
    with refuses(*refusal) as caught:
        identify(environ)
    assert caught.value.fix


def test_an_empty_variable_counts_as_unset():
    assert identify({"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": ""}).source == "alone"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n0", ["n0"]),
        ("n[0-2,07-09],x", ["n0", "n1", "n2", "n07", "n08", "n09", "x"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("a,b[3],c-d", ["a", "b3", "c-d"]),
    ],
)
def test_slurm_node_lists_expand_in_order(text, hosts):
    assert list(expand_hosts(text)) == hosts


def test_an_empty_node_list_is_refused():
    with refuses("env.slurm-nodelist-empty"):
        expand_hosts("")


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (None, None),
        ("", ()),
        ("0,1", ("0", "1")),
        (" 2 , 0 ", ("2", "0")),
        ("-1", ()),
        ("1,-1,0", ("1",)),
        ("GPU-8f2c,3", ("GPU-8f2c", "3")),
    ],
)
def test_visible_cuda_devices_are_read_as_cuda_reads_them(text, devices):
    assert visible_cuda_devices({} if text is None else {"CUDA_VISIBLE_DEVICES": text}) == devices


def test_a_gpu_per_task_is_known_from_slurm():
    assert has_own_gpu({"SLURM_GPUS_PER_TASK": "1"})
    # what srun --gpus-per-task=1 sets, and what --gpus=2 sets (22.05)
    assert has_own_gpu(SLURM | {"SLURM_STEP_GPUS": "1", "SLURM_GPUS_ON_NODE": "2"})
    assert not has_own_gpu(SLURM | {"SLURM_STEP_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2"})
    assert not has_own_gpu(SLURM)


def test_master_endpoint_is_none_where_unset():
    assert master_endpoint({}) == (None, None)
    assert master_endpoint({"MASTER_ADDR": "h", "MASTER_PORT": "9"}) == ("h", 9)


def launched(environ, **changes):
    shape = {"rank": 1, "world_size": 2, "local_rank": 1, "local_world_size": 2, "cores": 6}
    return rank_environment(environ=environ, **(shape | changes))


def test_a_launched_rank_identifies_itself_whatever_surrounds_it():
    for surroundings in ({}, TORCHRUN, SLURM, OPENMPI, HYDRA):
        identity = identify(launched(surroundings))
        assert (identity.source, identity.rank, identity.world_size, identity.local_rank) == ("shardwise", 1, 2, 1)
        assert (identity.local_world_size, identity.node_rank, identity.num_nodes) == (2, 0, 1)


def test_a_launched_rank_shares_the_cores():
    assert launched({})["OMP_NUM_THREADS"] == "3"
    assert launched({}, cores=1)["OMP_NUM_THREADS"] == "1"
    assert launched({}, cores=None, local_world_size=1)["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))


def test_a_launched_rank_gets_the_ranks_of_its_node_by_deepspeeds_name_too():
    assert launched({"LOCAL_SIZE": "9"})["LOCAL_SIZE"] == "2"


def test_a_launched_rank_talks_over_loopback_only_when_all_ranks_are_here():
    assert launched({})["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert "GLOO_SOCKET_IFNAME" not in launched({}, world_size=4)


def test_what_the_user_set_stays_and_extra_wins():
    environ = launched({"OMP_NUM_THREADS": "7", "HOME": "/h", "A": "1"}, extra={"A": "2", "MASTER_PORT": "5"})
    assert (environ["OMP_NUM_THREADS"], environ["HOME"], environ["A"], environ["MASTER_PORT"]) == ("7", "/h", "2", "5")


def test_stale_launcher_variables_do_not_reach_a_launched_rank():
    environ = launched(SLURM | OPENMPI | HYDRA | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert environ["SLURM_JOB_ID"] == "77"
    assert not [name for name in environ if name.startswith(("OMPI_COMM", "PMI", "MPI_", "TORCHELASTIC"))]
    assert "SLURM_PROCID" not in environ


def test_adopting_an_environment_replaces_the_whole_of_it(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    adopt({"ONLY": "this"})
    assert dict(os.environ) == {"ONLY": "this"}


def test_environment_and_hardware_import_no_torch():
    code = "import sys, shardwise.environment, shardwise.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_folders_of_the_user_follow_xdg_and_ignore_relative_paths():
    assert str(config_directory({"HOME": "/home/me"})) == "/home/me/.config/shardwise"
    assert str(config_directory({"HOME": "/home/me", "XDG_CONFIG_HOME": "/etc/me"})) == "/etc/me/shardwise"
    assert str(cache_directory({"HOME": "/home/me", "XDG_CACHE_HOME": "cache"})) == "/home/me/.cache/shardwise"
