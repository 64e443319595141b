"""A world over MPI on two machines, which mpirun reaches by ssh: no rank is given an address."""

import sys

import pytest

from env import mpi, ssh

pytestmark = [
    mpi.needs_mpirun,
    pytest.mark.prove,
    pytest.mark.skipif(bool(ssh.why_not()), reason=ssh.why_not() or "there is ssh"),
]

SCRIPT = """
import shardwise as sw

with sw.world(backend="mpi", timeout_s=60) as world:
    world.store.set(f"from {world.rank}", world.host)
    heard = world.store.get(f"from {world.size - 1 - world.rank}").decode()
    facts = (world.node, world.num_nodes, world.local_size, world.host, heard, world.sum({"ranks": 1.0}))
    if world.is_main:
        print(facts, flush=True)
    dealt = world.gather((world.rank, world.node))
if world.is_main:
    print(dealt)
"""


@pytest.mark.parametrize(("mapping", "dealt"), [("slot", [0, 0, 1, 1]), ("node", [0, 1, 0, 1])])
def test_ranks_of_two_machines_join_without_an_address_and_know_their_node(tmp_path, mapping, dealt):
    (tmp_path / "script.py").write_text(SCRIPT)
    with ssh.servers(2, shared=tmp_path) as (first, second):
        argv = [mpi.find().program, "--host", f"{first.name}:2,{second.name}:2", "--map-by", mapping, "-n", "4"]
        # Addresses of the machine that lends the hosts mean nothing on them.
        argv += ["--mca", "btl_tcp_if_include", "10.77.0.0/16", "--mca", "btl", "tcp,sm,self"]
        result = first.run(
            [*argv, sys.executable, tmp_path / "script.py"], env=mpi.environment(), timeout=120, check=False
        )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    facts, nodes = result.stdout.splitlines()
    assert facts == f"(0, 2, 2, '{first.name}', '{second.name}', {{'ranks': 4.0}})"
    assert nodes == str(list(enumerate(dealt)))
