"""Explained calls: real ranks make them, and what is drawn is what the usual pictures show."""

import pytest
import torch
import torch.distributed as dist

from refusals import assert_refused, refuses
from shardwise.cli.main import main
from shardwise.measurement.explain import NAMES, check_names, default_nproc, explain_in
from shardwise.measurement.explain_text import draw
from shardwise.testing import run_ranks

PICTURES = {
    "all_reduce": """
Before:           After all_reduce(SUM):
Rank 0: [1, 2]    Rank 0: [4, 6]
Rank 1: [3, 4]    Rank 1: [4, 6]
                  (1+3=4, 2+4=6)
""",
    "broadcast": """
Before:                 After broadcast:
Rank 0: [1, 2, 3, 4]    Rank 0: [1, 2, 3, 4]
Rank 1: [0, 0, 0, 0]    Rank 1: [1, 2, 3, 4]
""",
    "all_gather": """
Before:           After all_gather:
Rank 0: [1, 2]    Rank 0: [[1,2], [3,4]]
Rank 1: [3, 4]    Rank 1: [[1,2], [3,4]]
""",
    "reduce_scatter": """
Input (the same on all):    After reduce_scatter(SUM):
Rank 0: [[1,2], [3,4]]      Rank 0: [2, 4]   (SUM of index 0)
Rank 1: [[1,2], [3,4]]      Rank 1: [6, 8]   (SUM of index 1)
""",
    "gather": """
Before:           After gather:
Rank 0: [1, 2]    Rank 0: [[1,2], [3,4]]
Rank 1: [3, 4]    Rank 1: -
""",
    "scatter": """
Before:                   After scatter:
Rank 0: [[1,2], [3,4]]    Rank 0: [1, 2]
Rank 1: -                 Rank 1: [3, 4]
""",
    "all_to_all": """
Before:             After all_to_all:
Rank 0: [0, 1]      Rank 0: [0, 10]
Rank 1: [10, 11]    Rank 1: [1, 11]
""",
    "send": """
Before:              After send:
Rank 0: [1, 2, 3]    Rank 0: [1, 2, 3]
Rank 1: [0, 0, 0]    Rank 1: [1, 2, 3]
""",
    "isend": """
Before:              After isend:
Rank 0: [1, 2, 3]    Rank 0: [4, 5, 6]
Rank 1: [4, 5, 6]    Rank 1: [1, 2, 3]
""",
}


def explain_all(world):
    return {name: explain_in(world, name) for name in NAMES}


@pytest.fixture(scope="module")
def found():
    """What two real ranks showed, the same on both."""
    first, second = run_ranks(explain_all, 2)
    assert first == second
    return first


@pytest.mark.parametrize("name", PICTURES)
def test_two_ranks_draw_the_usual_picture(found, name):
    drawn = "\n".join(line for line, _ in draw(found[name]))
    assert PICTURES[name] in f"{drawn}\n"


def test_only_the_target_of_a_reduce_has_the_sum(found):
    before, after = found["reduce"].parts[0].columns
    assert before.values == ("[1, 2]", "[3, 4]")
    assert after.values[0] == "[4, 6]"
    assert after.values[1].endswith("(undefined)")


def test_nobody_leaves_a_barrier_before_the_last_came(found):
    came, left = (column.values for column in found["barrier"].parts[0].columns)
    seconds = [[float(text.split()[-2]) for text in texts] for texts in (came, left)]
    assert min(seconds[1]) >= max(seconds[0]) >= 0.05


def test_a_ddp_step_shows_its_five_stages_with_real_values(found):
    step = found["ddp"]
    construct, forward, backward, *buckets, update = step.parts
    own, constructed = construct.columns
    assert own.values[0] != own.values[1]
    assert constructed.values == (own.values[0], own.values[0])
    assert forward.columns[0].values[1] == "batch [[3,4]] -> output [[-14]], loss -14"
    assert backward.columns[0].values == (
        "hidden [1, 2, -1, -2]  out [5, 11]  out.bias [1]",
        "hidden [3, 4, -3, -4]  out [11, 25]  out.bias [1]",
    )
    assert [part.title for part in buckets] == [
        "4. all-reduce of bucket 0: out.bias, out.weight",
        "4. all-reduce of bucket 1: hidden.weight",
    ]
    assert buckets[1].columns[1].values == ("[2, 3, -2, -3]", "[2, 3, -2, -3]")
    assert update.columns[1].values[0] == "hidden [[0.8,1.7], [3.2,4.3]]  out [[0.2,-2.8]]  out.bias [-0.1]"
    assert "are equal; the gradients are equal to those of one process" in update.note


STEPS = {
    # The last column of a part by its number, as worked out by hand.
    "fsdp": {0: ("[[1,2]]", "[[3,4]]"), 3: ("[[19,27]]", "[[43,61]]"), 4: ("[[-0.9,-0.7]]", "[[-1.3,-2.1]]")},
    "zero": {0: ("[[1,1]]", "[[1,1]]"), 2: ("[[19,27]]", "[[43,61]]"), 3: ("[[-0.99,-0.79]]", "[[-1.39,-2.19]]")},
    "tp": {1: ("[[5]]", "[[22]]"), 2: ("[[27]]", "[[27]]"), 3: ("[[7,10]]", "[[7,10]]"), 4: ("[[0.5]]", "[[0.9]]")},
    "pp": {1: ("[[2,4], [4,6]]", "[[6,12], [12,18]]"), 3: ("m0 m1 ..", ".. m0 m1"), 4: ("0.8", "2.2")},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_a_strategy_shows_real_values_and_ends_at_the_weights_of_one_process(found, name):
    parts = found[name].parts
    assert {at: parts[at].columns[-1].values for at in STEPS[name]} == STEPS[name]
    assert parts[-1].note == "(the updated weights are those of one process)"


def explain_wrongly(world):
    real = dist.all_reduce
    dist.all_reduce = lambda tensor, **options: real(tensor.add_(1), **options)
    dist.reduce_scatter = lambda output, parts, **_: output.copy_(parts[world.rank])
    try:
        return [explain_in(world, name).parts[-1].note for name in ("fsdp", "zero")]
    finally:
        dist.all_reduce = real


def test_a_step_that_is_not_that_of_one_process_is_noticed():
    assert all("NOT those of one process" in note for note in run_ranks(explain_wrongly, 2)[0])


def explain_some(world):
    reduced = {op: explain_in(world, "all_reduce", op) for op in ("AVG", "PRODUCT", "MAX", "BXOR")}
    return (
        reduced,
        explain_in(world, "isend"),
        explain_in(world, "ddp"),
        explain_in(world, "send"),
        explain_steps(world),
    )


def explain_steps(world):
    return {explain_in(world, name).parts[-1].note for name in STEPS}


def test_three_ranks_and_other_operations():
    reduced, ring, step, pairs, notes = run_ranks(explain_some, 3)[0]
    assert notes == {"(the updated weights are those of one process)"}
    assert reduced["AVG"].parts[0].note == "((1+3+5)/3=3, (2+4+6)/3=4)"
    assert reduced["PRODUCT"].parts[0].note == "(1x3x5=15, 2x4x6=48)"
    assert reduced["MAX"].parts[0].note == "(max(1, 3, 5)=5, max(2, 4, 6)=6)"
    assert reduced["BXOR"].parts[0].note == "(1 ^ 3 ^ 5=7, 2 ^ 4 ^ 6=0)"
    assert ring.parts[0].columns[1].values == ("[7, 8, 9]", "[1, 2, 3]", "[4, 5, 6]")
    assert "the gradients are equal to those of one process with all 3 batches" in step.parts[-1].note
    assert pairs.parts[0].columns[1].values == ("[1, 2, 3]", "[1, 2, 3]", "[7, 8, 9]   (no peer)")


def mixed(world):
    tensor = torch.arange(2) + 1 + 2 * world.rank
    with pytest.raises(ValueError, match="different dtypes"):
        dist.all_gather([torch.zeros(2) for _ in range(world.size)], tensor)
    with pytest.raises(ValueError, match="different dtypes"):
        dist.reduce_scatter(torch.zeros(2), [torch.tensor([1, 2]), torch.tensor([3, 4])])
    average = torch.arange(2)
    with pytest.raises(RuntimeError):
        dist.all_reduce(average, dist.ReduceOp.AVG)
    return True


def test_what_is_reported_as_mistaken_is(found):
    assert run_ranks(mixed, 2) == [True, True]
    for name in ("all_gather", "reduce_scatter"):
        assert "torch raises ValueError" in found[name].corrected
    for name in ("broadcast", "send"):
        assert "is float32 and torch.tensor(" in found[name].corrected


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("allreduce", None, 2), ("bench.unknown-explanation", "'allreduce'", "'all_reduce'")),
        (("all_reduce", "SUMM", 2), ("bench.unknown-operation", "'SUMM'", "'SUM'")),
        (("broadcast", "MAX", 2), ("bench.operation-not-applicable", "broadcast", "MAX")),
        (("send", None, 1), ("bench.too-few-ranks", "send", 1, "--nproc 2")),
    ],
    ids=["name", "operation", "no operation", "ranks"],
)
def test_what_cannot_be_explained_is_refused(arguments, refusal):
    with refuses(*refusal):
        check_names(*arguments)


def test_all_leaves_out_what_needs_more_ranks():
    assert check_names("all", None, 2) == NAMES
    assert "send" not in check_names("all", None, 1)
    assert [default_nproc(name) for name in ("all_gather", "send", "ddp", "tp", "all")] == [4, 2, 2, 2, 4]


def test_an_unknown_name_is_one_sentence_and_exit_code_2(capsys):
    assert main(["bench", "comm", "--explain", "brodcast"]) == 2
    assert_refused(capsys.readouterr().err, "bench.unknown-explanation", "'brodcast'", "'broadcast'")


def test_the_command_starts_ranks_of_its_own(capfd):
    argv = ["--explain", "all_reduce", "--nproc", "2", "--ops", "min", "--device", "cpu"]
    assert main(["bench", "comm", *argv]) == 0
    shown = capfd.readouterr().out
    assert "dist.all_reduce(tensor, op=ReduceOp.MIN)" in shown
    assert "Rank 1: [3, 4]    Rank 1: [1, 2]" in shown
