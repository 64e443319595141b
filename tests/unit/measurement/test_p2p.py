"""Links between ranks: every pair is measured in every way, what arrives is checked, a slow link is found."""

import json
import time

import pytest
import torch
import torch.distributed as dist

from refusals import assert_refused, refuses
from shardwise.cli.main import main
from shardwise.measurement.comm.collectives import WAYS
from shardwise.measurement.p2p import PairSettings, measure_world, tournament
from shardwise.measurement.p2p_verdict import verdict_sentences
from shardwise.testing import run_ranks

QUICK = PairSettings(large_bytes=4096, budget_s=0.05)


@pytest.mark.parametrize("together", [False, True], ids=["one at a time", "together"])
def test_every_pair_is_measured_in_every_way_and_known_to_every_rank(together):
    first, *others = run_ranks(measure_world, 3, PairSettings(large_bytes=4096, budget_s=0.05, together=together))
    assert others == [first, first]
    measured = {(cell.way, cell.source, cell.target) for cell in first.timings}
    pairs = {(a, b) for a in range(3) for b in range(3) if a != b}
    assert measured == {(way, *pair) for way in WAYS for pair in pairs}
    assert len(first.timings) == len(measured)
    assert all(cell.latency.repeats >= 3 and cell.wrong == 0 for cell in first.timings)
    assert all(cell.bytes_per_s == pytest.approx(4 * 4096 / cell.transfer.min_s) for cell in first.timings)
    assert set(first.latencies) == set(first.rates) == pairs


@pytest.mark.parametrize("size", range(2, 10))
def test_a_tournament_has_every_ordered_pair_once_and_no_rank_twice_in_a_round(size):
    rounds = tournament(size)
    games = [pair for games in rounds for pair in games]
    assert sorted(games) == [(a, b) for a in range(size) for b in range(size) if a != b]
    assert all(len({rank for pair in games for rank in pair}) == 2 * len(games) for games in rounds)
    assert len(rounds) == 2 * (size - 1 + size % 2)


def measure_with_a_fault(world, spec, fault):
    real = dist.send

    def faulty(tensor, peer, **options):
        if tensor.dtype == torch.uint8:  # what is measured, not the messages beside it
            tensor = fault(world.rank, peer, tensor)
        return real(tensor, peer, **options)

    dist.send = faulty
    return measure_world(world, spec)


def flip(rank, peer, tensor):
    if (rank, peer) != (1, 0) or tensor.numel() < 4096:
        return tensor
    wrong = tensor.clone()
    wrong[17] ^= 1
    return wrong


def test_a_byte_that_arrives_wrong_is_caught_and_the_pair_named():
    spec = PairSettings(large_bytes=4096, budget_s=0.05, ways=("send",))
    found = run_ranks(measure_with_a_fault, 2, spec, flip)[0]
    assert {(cell.source, cell.target): cell.wrong for cell in found.timings} == {(0, 1): 0, (1, 0): 4}
    host = found.places[0].host
    assert verdict_sentences(found)[0].startswith(f"WRONG: 4 received bytes from rank 1 ({host}) to rank 0 ({host})")


def spoil_echo(rank, peer, tensor):
    return tensor + 1 if rank == 1 and tensor.numel() == 8 else tensor


def test_a_small_message_that_comes_back_wrong_is_caught():
    spec = PairSettings(large_bytes=4096, budget_s=0.05, ways=("send",))
    found = run_ranks(measure_with_a_fault, 2, spec, spoil_echo)[0]
    assert {(cell.source, cell.target): cell.wrong for cell in found.timings}[0, 1] == 8


def hold_up(rank, peer, tensor):
    if {rank, peer} == {0, 2} and tensor.numel() == 8:
        time.sleep(0.01)
    return tensor


def test_a_delayed_link_shows_it_in_its_cells():
    spec = PairSettings(large_bytes=4096, budget_s=0.2, ways=("send",))
    latencies = run_ranks(measure_with_a_fault, 3, spec, hold_up)[0].latencies
    assert min(latencies[0, 2], latencies[2, 0]) >= 0.01
    assert min(latencies.values()) < 0.01


def refused(world, spec, *refusal):
    with refuses(*refusal) as error:
        measure_world(world, spec)
    return str(error.value)


def test_one_rank_and_a_size_over_memory_are_refused_on_every_rank():
    run_ranks(refused, 1, QUICK, "bench.too-few-ranks", "p2p")
    first, second = run_ranks(refused, 2, PairSettings(large_bytes=1 << 50), "bench.not-enough-memory", "use --size")
    assert first == second


@pytest.mark.parametrize(
    ("argv", "refusal"),
    [
        ([], ("bench.too-few-ranks", "--nproc 2")),
        (["--nproc", "1"], ("bench.too-few-ranks", "--nproc 2")),
        (["--nproc", "2", "--size", "0"], ("bench.size-zero", "'0'")),
        (["--nproc", "2", "--size", "4XiB"], ("bench.size-syntax", "'4XiB'")),
        (["--nproc", "2", "--report", "links.pdf"], ("bench.report-extension", ".html", ".md")),
    ],
    ids=["alone", "one rank", "no bytes", "no unit", "no kind of report"],
)
def test_bad_input_is_one_sentence_and_exit_code_2(argv, refusal, capsys):
    assert main(["bench", "p2p", *argv]) == 2
    shown = capsys.readouterr().err
    assert_refused(shown, *refusal)
    assert shown.count("\n") == 1


def test_the_command_writes_json_and_a_report(tmp_path, capfd):
    page = tmp_path / "links.md"
    argv = ["bench", "p2p", "--nproc", "2", "--device", "cpu", "--size", "64KiB", "--seconds", "0.2", "--way", "isend"]
    assert main([*argv, "--json", "--report", str(page)]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [(link["source"], link["target"]) for link in found["links"]] == [(0, 1), (1, 0)]
    assert all(link["latency_s"] > 0 and link["bytes_per_s"] > 0 for link in found["links"])
    assert found["pairs"]["spec"]["large_bytes"] == 65536
    assert {cell["way"] for cell in found["pairs"]["timings"]} == {"isend"}
    assert "# Links between 2 ranks (gloo)" in page.read_text()
