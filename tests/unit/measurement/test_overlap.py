"""Overlap: collectives that can be left out, what hides behind what, and advice that is worth its name."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from refusals import assert_refused
from shardwise.cli.main import main
from shardwise.measurement.overlap import (
    BUCKET,
    PREFETCH,
    SYNC,
    advise,
    advised_plan,
    distinct,
    summarise,
    vary,
)
from shardwise.measurement.overlap_report import hidden_text, overlap_findings, overlap_table, verdict
from shardwise.measurement.split import MeasuredTurn, MeasuredTurns, measure_turns, split
from shardwise.measurement.switch import SwitchedWorld, replay
from shardwise.planner.settle import LocalDevice, settle
from shardwise.plans import Communication, Plan
from shardwise.plans.toml import plan_from_toml, plan_to_toml
from shardwise.testing import run_ranks
from shardwise.training.build import build_step


@pytest.fixture
def num_blocks():
    return 3


def test_collectives_happen_while_the_switch_is_on_and_can_be_played_again():
    def body(world):
        here = SwitchedWorld.around(world)
        group = here.axis_group(sw.Layout(replicate=2), ("replicate",))
        value = torch.full((3,), world.rank + 1.0)

        def gather():
            parts = [torch.zeros(3) for _ in range(2)]
            dist.all_gather(parts, value, group=group)
            dist.all_reduce(value, group=group)
            return parts

        here.switch.on = False
        left_out, alone = gather(), value.clone()
        here.switch.on = True
        calls = here.switch.record(gather)
        replay(calls)()
        assert group._get_backend(world.device).name() == "gloo"  # torch asks so in worlds that are bound to GPUs
        return left_out, alone, value, [(call.method, call.num_bytes) for call in calls]

    for rank, (left_out, alone, summed, calls) in enumerate(run_ranks(body, 2)):
        assert torch.equal(torch.stack(left_out), torch.zeros(2, 3))
        assert torch.equal(alone, torch.full((3,), rank + 1.0))
        assert torch.equal(summed, torch.full((3,), 3.0))
        assert calls == [("allgather", 24), ("allreduce", 12)]


@pytest.mark.representative("ddp-2", "zero3-2")
@pytest.mark.parametrize(("name", "ranks"), [("ddp", 2), ("zero1", 2), ("zero3", 2), ("hsdp", 4)])
def test_a_switched_world_trains_as_the_world_inside_it(job, name, ranks):
    plan = Plan.preset(name, ranks, batch_size=8)

    def body(world):
        losses = []
        for here in (world, SwitchedWorld.around(world)):
            step = build_step(job, plan, here)
            losses.append([world.sum({"loss": float(step(batch).loss_share)})["loss"] for batch in step.feed])
        return losses

    plain, switched = run_ranks(body, ranks)[0]
    assert len(plain) == 5
    assert switched == plain


def calls_of(job, plan):
    """Return (collectives, bytes) of one step on two ranks, with the turns that were measured."""

    def body(world):
        here = SwitchedWorld.around(world)
        turns = measure_turns(job, plan, here, turns=2, reads=True)
        assert here.switch.on
        return turns

    first, second = run_ranks(body, 2)
    assert (first.collectives, first.num_bytes) == (second.collectives, second.num_bytes)
    assert len(first.turns) == 2
    for turn in first.turns:
        assert min(turn.trained, turn.whole, turn.compute, turn.communication) > 0
    return first.collectives, first.num_bytes


def test_smaller_buckets_are_more_collectives_of_the_same_bytes(job):
    plan = Plan.preset("ddp", 2, batch_size=8)
    one, all_bytes = calls_of(job, plan)
    many, same_bytes = calls_of(job, dataclasses.replace(plan, communication=Communication(bucket_mb=0.005)))
    parameters = 50 * 32 + 3 * (32 * 32 + 32) + 32 * 50 + 50
    assert (one, all_bytes) == (1, 4 * parameters)
    assert many > one
    assert same_bytes == all_bytes


def test_summing_after_every_micro_batch_doubles_what_is_sent(job):
    last = Plan.preset("ddp", 2, batch_size=8, accumulation=2)
    assert calls_of(job, last)[0] == 1
    assert calls_of(job, dataclasses.replace(last, gradient_sync="every"))[0] == 2


def test_sharded_weights_are_measured_without_their_gathers(job):
    collectives, _ = calls_of(job, Plan.preset("zero3", 2, batch_size=8))
    units = 3 + 1  # blocks, and the rest
    assert collectives == units + units + units + 1  # gathered, gathered again, reduced; then the norm


def turns(*steps, compute=0.010, communication=0.004):
    made = (MeasuredTurn(trained=None, whole=step, compute=compute, communication=communication) for step in steps)
    return MeasuredTurns(turns=tuple(made), collectives=3, num_bytes=1 << 20)


def measured(*rounds, bucket_mb=25.0):
    return summarise({BUCKET: bucket_mb}, [[turns(*steps), turns(*steps)] for steps in rounds])


@pytest.mark.parametrize(("step", "hidden"), [(0.010, 1.0), (0.011, 0.75), (0.014, 0.0), (0.016, -0.5)])
def test_hidden_is_the_share_of_communication_that_does_not_lengthen_the_step(step, hidden):
    assert split([turns(step, step, step)]).hidden == pytest.approx(hidden)


def test_the_slowest_rank_counts_and_the_others_are_idle_meanwhile():
    found = split([turns(0.020, compute=0.010), turns(0.020, compute=0.016)])
    assert found.compute.median_s == pytest.approx(0.016)
    assert found.parts == pytest.approx({"compute": 0.013, "communication": 0.004, "data": 0.0, "idle": 0.003})


def test_a_step_that_varies_more_than_communication_takes_gives_no_overlap():
    assert hidden_text(measured((0.010, 0.020, 0.030), (0.011, 0.021, 0.029))) == "too noisy"
    assert hidden_text(measured((0.011, 0.011), (0.011, 0.011))) == "75% ± 0%"


def test_a_faster_setting_is_advised_and_written_into_the_plan():
    plan = Plan.preset("ddp", 2, batch_size=8)
    found = [measured((0.020, 0.021), (0.020, 0.021)), measured((0.015, 0.016), (0.015, 0.016), bucket_mb=5.0)]
    advice = advise(found)
    assert advice.chosen == 1
    assert advice.gain_s == pytest.approx(0.005)
    assert verdict(found, advice).startswith("bucket_mb 5 takes 24.4% less than bucket_mb 25")
    text = plan_to_toml(advised_plan(plan, found, advice))
    assert "bucket_mb = 5.0 # bench overlap: a step takes 24.4% less" in text
    assert plan_from_toml(text, "plan.toml").communication.bucket_mb == 5.0


def test_a_gain_within_the_spread_is_not_advised():
    found = [measured((0.020, 0.024), (0.020, 0.024)), measured((0.019, 0.023), (0.019, 0.023), bucket_mb=5.0)]
    advice = advise(found)
    assert advice.chosen == 0
    assert 0 < advice.gain_s < advice.spread_s
    text = plan_to_toml(advised_plan(Plan.preset("ddp", 2), found, advice))
    assert "bucket_mb = 25.0 # bench overlap: kept" in text


def test_a_gain_that_one_round_contradicts_is_not_advised():
    own = measured((0.0200, 0.0201), (0.0200, 0.0201), (0.0150, 0.0150))
    other = measured((0.0160, 0.0161), (0.0160, 0.0161), (0.0155, 0.0155), bucket_mb=5.0)
    assert advise([own, other]).chosen == 0


def test_one_round_recommends_nothing():
    found = [measured((0.0200, 0.0201)), measured((0.0150, 0.0151), bucket_mb=5.0)]
    assert advise(found).chosen == 0
    assert "one round is not enough" in verdict(found, advise(found))


def test_a_machine_that_computes_faster_meanwhile_recommends_nothing():
    slow, fast = turns(0.0200, 0.0201, compute=0.016), turns(0.0150, 0.0151, compute=0.011)
    found = [summarise({BUCKET: size}, [[each], [each]]) for size, each in ((25.0, slow), (5.0, fast))]
    assert advise(found).chosen == 0
    assert advise(found).gain_s == pytest.approx(0.0)


def test_what_varies_is_what_the_plan_communicates_by():
    ddp = vary(Plan.preset("ddp", 2, batch_size=8))
    assert ddp[0] == {BUCKET: 25.0}
    assert sorted(values[BUCKET] for values in ddp) == [1.0, 5.0, 25.0, 100.0]
    fsdp = vary(Plan.preset("fsdp", 2, batch_size=8, accumulation=2), prefetches=(1, 2))
    assert fsdp[0] == {PREFETCH: 1, SYNC: "last"}
    assert len(fsdp) == 4
    assert vary(Plan.preset("tp", 2, batch_size=8)) == [{}]


def test_a_static_graph_is_not_measured_with_a_sum_it_does_not_allow():
    plan = Plan.preset("ddp", 2, batch_size=8, accumulation=2)
    plan = dataclasses.replace(plan, gradient_sync="every", communication=Communication(static_graph=True))
    assert {values[SYNC] for values in vary(plan)} == {"every"}


def test_buckets_that_hold_everything_are_measured_once():
    others = [{BUCKET: size} for size in (0.5, 2.0, 5.0, 100.0)]
    assert distinct(others, {BUCKET: 25.0}, num_bytes=3 << 20) == [{BUCKET: 0.5}, {BUCKET: 2.0}]


def test_a_report_has_a_row_and_a_bar_for_each_setting():
    found = [measured((0.020, 0.021), (0.020, 0.021)), measured((0.015, 0.016), (0.015, 0.016), bucket_mb=5.0)]
    advice = advise(found)
    findings = overlap_findings(found, advice, title="digits", facts=(("host", "here"),))
    table, bars = findings.sections[0].parts
    assert table == overlap_table(found, advice)
    assert [row[0] for row in table.rows] == ["plan: bucket_mb 25", "bucket_mb 5 *"]
    assert [label for label, _ in bars.rows] == ["bucket_mb 25", "bucket_mb 5"]
    assert bars.rows[1][1] == pytest.approx((10.0, 0.0, 5.5))
    alone = [measured((0.011, 0.011))]
    hiding = overlap_findings(alone, advise(alone), title="digits", facts=())
    assert hiding.sections[0].parts[1].rows[0][1] == pytest.approx((7.0, 3.0, 1.0))


@pytest.mark.prove
def test_two_real_ranks_are_measured_from_the_command_line(job_file, tmp_path, capsys):
    command = ["bench", "overlap", str(job_file), "--nproc", "2", "--device", "cpu"]
    options = ["--rounds", "1", "--buckets", "0.01,100", "--set", "accumulation=2", "--json"]
    files = ["--out", str(tmp_path / "plan.toml"), "--report", str(tmp_path / "report.md")]
    assert main([*command, *options, *files]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["values"] for each in found["settings"]] == [
        {BUCKET: 25.0, SYNC: "last"},
        {BUCKET: 0.01, SYNC: "last"},
        {BUCKET: 0.01, SYNC: "every"},
        {BUCKET: 100.0, SYNC: "every"},  # for "last" it is as large as 25: all gradients in one
    ]
    assert all(each["split"]["communication"]["median_s"] > 0 for each in found["settings"])
    plan = settle(str(tmp_path / "plan.toml"), batch_size=8, world_size=2, device=LocalDevice())
    assert plan.accumulation == 2
    assert plan.communication.bucket_mb == found["settings"][found["advice"]["chosen"]]["values"][BUCKET]
    assert "bench overlap" in (tmp_path / "plan.toml").read_text()
    assert found["verdict"] in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ([], ("bench.too-few-ranks", "--nproc 2")),
        (["--nproc", "2", "--plan", "pp"], ("bench.overlap-pipeline", "pp")),
        (["--nproc", "2", "--buckets", "1,x"], ("cli.number-list-invalid", "--buckets", "'1,x'")),
        (["--nproc", "2", "--buckets", "nan"], ("cli.number-list-invalid", "--buckets", "'nan'")),
        (["--nproc", "2", "--plan", "fsdp", "--buckets", "1"], ("bench.buckets-without-ddp", "--plan ddp")),
        (["--nproc", "2", "--prefetch", "2"], ("bench.prefetch-without-shards", "--plan fsdp")),
        (["--nproc", "2", "--plan", "fsdp", "--prefetch", "1.5"], ("bench.prefetch-not-whole", "--prefetch")),
        (["--nproc", "2", "--out", "plan.json"], ("bench.plan-path-invalid", "plan.json", ".toml")),
        (["--nproc", "2", "--report", "report.pdf"], ("bench.report-extension", ".html", ".md")),
        (["--nproc", "3"], ("plan.batch-not-divisible", "batch_size")),
    ],
)
def test_bad_input_gets_one_sentence(job_file, capsys, options, refusal):
    assert main(["bench", "overlap", str(job_file), "--device", "cpu", *options]) == 2
    shown = capsys.readouterr().err
    assert_refused(shown, *refusal)
    assert shown.count("\n") == 1
