"""MLX over MPI in a world of MPI: one library, started by MLX, for both; else the ring, and a note with the reason."""

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mpi4py")

from env.mpi import needs_mpirun, run

SUM = """
    import mlx.core as mx
    import shardwise as sw
    from shardwise.engines.mlx.ring import mpi_group
    from shardwise.engines.mlx.ring import join_group

    notes = []
    {first}
    with sw.world(backend="mpi") as world:
        group = join_group(world, note=notes.append)
        total = mx.distributed.all_sum(mx.array([1.0 + world.rank], dtype=mx.float64), group=group)
        counted = world.sum({{"ranks": 1.0}})
        print("found", total.item(), counted["ranks"], group is mpi_group(), notes)
"""


@needs_mpirun
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("mpi_group()", "found 3.0 2.0 True []"),
        pytest.param("", 'found 3.0 2.0 False ["gradients are reduced over', marks=pytest.mark.prove),
    ],
    ids=["MLX starts it", "the world starts it"],
)
def test_a_world_of_mpi_sums_over_mpi_where_mlx_starts_it_and_over_the_ring_else(tmp_path, first, expected):
    result = run(tmp_path, 2, SUM.format(first=first))
    assert result.stdout.count(expected) == 2, (result.stdout, result.stderr)
