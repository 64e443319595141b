"""What a rank records of torch's collectives, without a change in its code."""

import re
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from shardwise.recorder import start_record
from shardwise.recorder.flight import _site
from shardwise.recorder.operations import Sites
from shardwise.runs import RunDirectory, calls
from shardwise.runs.call_reader import CallReader, read_last_calls
from shardwise.testing import run_ranks

HERE = Path(__file__).name


def recorded(tmp_path, body, nproc=2):
    """Run `body(rank)` on recorded ranks and return what each has recorded, by rank."""
    run = RunDirectory(tmp_path)

    def rank_body(world):
        start_record(run, world.rank, world.size)
        body(world.rank)
        return CallReader(run.calls(world.rank)).refresh()

    return run_ranks(rank_body, nproc)


def descriptions(calls_):
    return [f"{call.what.name} {call.what.match}".strip() for call in calls_]


@pytest.mark.parametrize("is_frames", [True, False])
def test_line_of_a_call_is_that_of_the_user_with_that_of_the_library_inside(is_frames):
    scope = {}
    library = "/env/lib/site-packages/accelerate/operations.py"
    exec(compile("def gather(find):\n    return find()\n", library, "exec"), scope)
    lines = []
    sites = Sites(torch.__path__[0], lambda line: lines.append(line) or len(lines))

    def here():
        frame = sys._getframe(1)
        if not is_frames:
            return sites.find(frame)
        own = sys._getframe(2)
        found = [{"filename": each.f_code.co_filename, "line": each.f_lineno} for each in (frame, own)]
        return lines.append(_site(found))

    scope["gather"](here)
    [line] = lines
    assert re.fullmatch(rf".*/{HERE}:\d+ \(in accelerate/operations.py:2\)", line)


def test_collectives_are_recorded_with_reduce_operation_dtype_and_size(tmp_path):
    def body(rank):
        tensor = torch.ones(2, 3)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        dist.broadcast(tensor.long(), 1)
        dist.reduce(tensor, 0)
        dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4))
        dist.barrier()

    zero, one = recorded(tmp_path, body)
    assert descriptions(zero) == [
        "all_reduce max float32*6",
        "broadcast root 1 int64*6",
        "reduce sum root 0 float32*6",
        "all_gather float32*4 float32*4",
        "barrier",
    ]
    assert descriptions(one) == descriptions(zero)
    assert [call.sequence for call in zero] == [1, 2, 3, 4, 5]
    assert all(call.left for call in zero)
    assert {call.group.members for call in zero} == {(0, 1)}


def test_the_end_of_the_default_group_is_recorded(tmp_path):
    run = RunDirectory(tmp_path)

    def body(rank):
        group = dist.new_group([0, 1])
        dist.barrier()  # or a rank may close its connections while the other one connects
        dist.destroy_process_group(group)
        assert not read_last_calls(run, rank, "").left_at
        dist.destroy_process_group()
        assert 0.0 < read_last_calls(run, rank, "").left_at <= time.time()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/again", rank=rank, world_size=2)
        assert not read_last_calls(run, rank, "").left_at
        dist.barrier()  # a rank that exits while the other one still connects would fail it

    recorded(tmp_path, body)


def test_the_source_line_is_the_scripts_own(tmp_path):
    def body(rank):
        dist.all_reduce(torch.ones(1))
        dist.all_gather_object([None, None], rank)

    zero, _ = recorded(tmp_path, body)
    lines = {call.site.rpartition("/")[2] for call in zero}
    first = body.__code__.co_firstlineno
    assert lines == {f"{HERE}:{first + 1}", f"{HERE}:{first + 2}"}


def test_gathers_of_root_and_others_match_though_only_the_root_has_outputs(tmp_path):
    def body(rank):
        mine = torch.ones(3)
        parts = [torch.ones(3), torch.ones(3)] if rank == 0 else None
        dist.gather(mine, parts, dst=0)
        dist.scatter(mine, parts, src=0)

    zero, one = recorded(tmp_path, body)
    assert descriptions(zero) == descriptions(one) == ["gather root 0 float32*3", "scatter root 0 float32*3"]


def test_uneven_parts_of_an_exchange_match(tmp_path):
    def body(rank):
        received = [1, 1] if rank else [3, 2]
        dist.all_to_all_single(torch.ones(sum(received)), torch.ones(4 - rank), received, [3 - rank, 1])

    zero, one = recorded(tmp_path, body)
    assert descriptions(zero) == descriptions(one) == ["all_to_all_single float32"]


def test_a_call_that_cannot_be_understood_is_made_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise AttributeError("another torch")

    def body(rank):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2

    monkeypatch.setattr("shardwise.recorder.torch_calls.describe_collective", refuse)
    zero, _ = recorded(tmp_path, body)
    assert zero == []


def test_messages_are_counted_by_who_sends_to_whom(tmp_path):
    def body(rank):
        for _ in range(2):
            dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(2), 0)
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(4), 1 - rank),
                dist.P2POp(dist.irecv, torch.ones(4), 1 - rank),
            ]
        )
        for request in requests:
            request.wait()

    zero, one = recorded(tmp_path, body)
    assert [(call.what.name, call.what.channel, call.sequence) for call in zero] == [
        ("send", "0>1:0", 1),
        ("send", "0>1:0", 2),
        ("send", "0>1:0", 3),
        ("recv", "1>0:0", 1),
    ]
    assert {call.what.peer for call in one} == {0}


def test_asynchronous_calls_are_waited_for_only_from_their_wait(tmp_path):
    def body(rank):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(0.05)
        work.wait()

    zero, _ = recorded(tmp_path, body)
    assert zero[0].waited - zero[0].entered > 0.04


def test_groups_count_for_themselves_and_know_their_members(tmp_path):
    def body(rank):
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=pair)

    zero, _ = recorded(tmp_path, body)
    made, world, pair = zero
    assert made.what.name == "new_group"
    assert world.sequence == pair.sequence == 1
    assert world.group != pair.group


def test_a_call_that_torch_refuses_takes_no_number(tmp_path):
    def body(rank):
        with pytest.raises((RuntimeError, ValueError)):
            dist.group.WORLD.allreduce([])
        dist.barrier()

    zero, _ = recorded(tmp_path, body)
    assert [(call.what.name, call.sequence) for call in zero] == [("barrier", 1)]


def test_a_call_in_backward_is_marked(tmp_path):
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            dist.all_reduce(gradient)
            return gradient

    def body(rank):
        dist.all_reduce(torch.ones(1))
        Sum.apply(torch.ones(3, requires_grad=True)).sum().backward()

    zero, _ = recorded(tmp_path, body)
    assert [call.backward for call in zero] == [False, True]


def test_batches_are_counted_and_their_time_summed(tmp_path):
    run = RunDirectory(tmp_path)

    def body(world):
        start_record(run, world.rank, world.size)
        for _ in DataLoader(range(3)):
            pass

    run_ranks(body, 1)
    reader = CallReader(run.calls(0))
    reader.refresh()
    assert reader.header(calls.BATCHES) == 4  # the end of the data is requested too
    assert reader.header(calls.DATA_TOTAL) > 0
    assert reader.header(calls.DATA_SINCE) == 0


def test_functional_collectives_are_recorded_and_counted_by_themselves(tmp_path):
    def body(rank):
        from torch.distributed import _functional_collectives as functional

        dist.all_reduce(torch.ones(1))
        assert functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist() == [2.0, 2.0]
        functional.broadcast(torch.ones(2, dtype=torch.int64), 1, dist.group.WORLD) + 1

    zero, one = recorded(tmp_path, body)
    assert (
        descriptions(zero)
        == descriptions(one)
        == ["all_reduce sum float32*1", "all_reduce sum float32*2", "broadcast root 1 int64*2"]
    )
    assert [(call.sequence, call.what.channel) for call in zero] == [(1, ""), (1, "functional"), (2, "functional")]
    assert all(HERE in call.site for call in zero)


def test_torch_compile_with_collectives_still_works(tmp_path):
    def body(rank):
        from torch.distributed import _functional_collectives as functional

        @torch.compile(backend="eager", fullgraph=True)
        def total(x):
            return functional.all_reduce(x, "sum", dist.group.WORLD) * 1

        assert total(torch.ones(2)).tolist() == [2.0, 2.0]

    recorded(tmp_path, body)
