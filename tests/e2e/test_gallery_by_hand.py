"""Chapter 4b of the gallery: parallelism by hand equals one process, and sends the computed bytes."""

import argparse
import importlib
import re

import pytest
import torch

from e2e.gallery import EXAMPLES, Chapter
from shardwise.testing import run_ranks

pytestmark = pytest.mark.timeout(240)

CHAPTER = Chapter(EXAMPLES / "04b-parallel-by-hand")
SMALL = {"width": 64, "blocks": 4, "length": 24, "batch_size": 4, "steps": 2}


@pytest.fixture
def script(monkeypatch):
    """Import a script of the chapter."""
    monkeypatch.syspath_prepend(CHAPTER.folder)
    return importlib.import_module


def options(**others):
    return argparse.Namespace(**(SMALL | others))


def assert_equal_to_one_process(script, asked, losses, weights):
    [(expected_losses, expected)] = run_ranks(lambda _: script("by_hand").train_alone(asked), 1)
    assert losses == pytest.approx(expected_losses, abs=1e-12)
    torch.testing.assert_close(weights, dict(expected), rtol=0, atol=1e-12)


def assert_bytes(measured, theory):
    # TCP also carries a header for each message, and a few numbers that ranks exchange.
    assert theory <= sum(measured) <= 1.1 * theory


@pytest.mark.parametrize("nproc", [2, 4])
def test_tensor_parallel_equals_one_process_and_sends_four_all_reduces_per_block(script, nproc):
    chapter, asked = script("tensor_parallel"), options()
    results = run_ranks(lambda _: chapter.train(asked), nproc)
    assert_equal_to_one_process(script, asked, *results[0][:2])
    assert_bytes([measured for *_, measured in results], chapter.bytes_of_a_step(asked, nproc))


@pytest.mark.parametrize(("kind", "nproc"), [("gpipe", 2), ("1f1b", 3)])
def test_pipeline_equals_one_process_and_keeps_the_micro_batches_of_its_schedule(script, kind, nproc):
    chapter, asked = script("pipeline_parallel"), options(schedule=kind, micro_batches=4)
    results = run_ranks(lambda _: chapter.train(asked), nproc)
    assert_equal_to_one_process(script, asked, results[0].losses, results[0].weights)
    assert_bytes([result.sent for result in results], chapter.bytes_of_a_step(asked, nproc))
    assert [result.most_waiting for result in results] == {"gpipe": [4, 4], "1f1b": [3, 2, 1]}[kind]
    for step in range(asked.steps):
        assert 0 < chapter.bubble([result.timelines[step] for result in results]) < 1


@pytest.mark.parametrize(("way", "nproc"), [("ring", 3), ("gather", 2)])
def test_context_parallel_equals_one_process(script, way, nproc):
    chapter, asked = script("context_parallel"), options(way=way)
    results = run_ranks(lambda _: (chapter.train(asked), chapter.bytes_of_attention(asked, nproc)), nproc)
    outcome, theory = results[0]
    assert_equal_to_one_process(script, asked, outcome.losses, outcome.weights)
    assert_bytes([result.sent_by_attention for result, _ in results], theory)


def test_a_forgotten_all_reduce_is_noticed(script):
    chapter, asked = script("tensor_parallel"), options()
    by_hand = script("by_hand")

    def body(_):
        chapter.CopyToRanks.backward = staticmethod(lambda _, gradient: gradient)
        losses, weights, _ = chapter.train(asked)
        by_hand.report_equality(asked, losses, weights)

    with pytest.raises(SystemExit, match="not the training of one process"):
        run_ranks(body, 2)


def test_a_schedule_runs_every_micro_batch_forward_and_then_backward(script):
    schedule = script("pipeline_parallel").schedule
    for kind in ("gpipe", "1f1b"):
        for stage in range(4):
            actions = schedule(kind, stage, 4, 6)
            assert sorted(actions) == sorted((way, index) for way in ("forward", "backward") for index in range(6))
            assert all(actions.index(("forward", n)) < actions.index(("backward", n)) for n in range(6))


def test_the_bubble_of_equal_stages_is_the_formula(script):
    chapter = script("pipeline_parallel")
    # Two stages and four micro-batches, a forward of 1 s and a backward of 2 s, GPipe: drawn by hand.
    first = [("forward", n, n, n + 1) for n in range(4)] + [("backward", n, 7 + 2 * n, 9 + 2 * n) for n in range(4)]
    second = [("forward", n, n + 1, n + 2) for n in range(4)]
    second += [("backward", n, 5 + 2 * n, 7 + 2 * n) for n in range(4)]
    assert chapter.bubble([first, second]) == pytest.approx(chapter.bubble_in_theory(2, 4))
    assert chapter.draw(first, 0, 15, columns=15) == "0123...aabbccdd"


@pytest.mark.prove
@pytest.mark.parametrize("line", CHAPTER.commands("_parallel.py"))
def test_command_equals_one_process_in_bytes_as_computed(line, tmp_path):
    output = CHAPTER.run(line, tmp_path)
    assert all(float(found) < 1e-9 for found in re.findall(r"(?:at most|weights by) (\S+?),?$", output, re.MULTILINE))
    pairs = re.findall(r"([\d,]+) bytes in theory, +([\d,]+) on TCP", output)
    for theory, measured in [[int(number.replace(",", "")) for number in pair] for pair in pairs]:
        assert theory <= measured < 1.1 * theory
    assert pairs
