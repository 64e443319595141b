"""Links and explanations on a GPU: gloo's ranks share it, NCCL has a world of one."""

import pytest

from refusals import refuses
from shardwise.cli.main import main
from shardwise.measurement.comm.collectives import WAYS
from shardwise.measurement.explain import NAMES, check_names, explain_on_ranks
from shardwise.measurement.p2p import PairSettings, measure_pairs
from shardwise.measurement.specs import on_ranks

pytestmark = pytest.mark.gpu


def test_ranks_that_share_a_gpu_measure_their_links_through_host_memory():
    spec = PairSettings(large_bytes=1 << 20, budget_s=1.0, device="cuda", backend="gloo")
    first, second = on_ranks(measure_pairs, 2, spec)
    assert first == second
    assert {cell.way for cell in first.timings} == set(WAYS)
    assert all(place.device.startswith("cuda") for place in first.places)
    assert not any(cell.wrong for cell in first.timings)


def test_nccl_alone_has_nobody_to_send_to():
    with refuses("bench.too-few-ranks", "--nproc 2"):
        on_ranks(measure_pairs, 1, PairSettings(device="cuda"))


def test_more_nccl_ranks_than_gpus_are_refused_in_one_sentence(capsys):
    assert main(["bench", "p2p", "--nproc", "64"]) == 2
    assert "[launch.nproc-exceeds-gpus]" in capsys.readouterr().err


@pytest.mark.parametrize(("nproc", "backend"), [(1, "nccl"), (2, "gloo")])
def test_every_call_is_explained_on_the_gpu(nproc, backend):
    names = check_names("all", None, nproc)
    found = on_ranks(explain_on_ranks, nproc, names, "SUM", "cuda", backend)[0]
    assert [explanation.name for explanation in found] == [name for name in NAMES if name in names]
