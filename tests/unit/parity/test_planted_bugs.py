"""Bugs planted for real in forked ranks: verify names each, with rank, parameter and step."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.data import cursor, feed, loaders
from shardwise.data import cursor as slices
from shardwise.dist import World
from shardwise.layout import Layout
from shardwise.parallel import apply, context, tensor
from shardwise.parallel import gradsync as norm
from shardwise.parallel.batch_norm import BatchNorm
from shardwise.parallel.tensor_gradients import ShardedRandom
from shardwise.parity import progress as pulse
from shardwise.parity.verify import verify
from shardwise.plans import pipeline
from shardwise.training.step import plain, update

JOBS = Path(__file__).parent / "jobs.py"


def verdict_on(plan, job="job", nproc=2, **options):
    report = verify(f"{JOBS}:{job}", [plan], nproc=nproc, **options)
    (verdict,) = report.verdicts
    return verdict


def finding_on(plan, **options):
    verdict = verdict_on(plan, **options)
    assert verdict.status == "failed", verdict
    (finding,) = verdict.findings
    return finding


def is_spread():
    return dist.get_world_size() > 1


@pytest.fixture
def plant(monkeypatch):
    """Replace a method in this process; forked ranks inherit it, one process is spared."""

    def plant(owner, name, bug):
        right = getattr(owner, name)

        def planted(*args, **kwargs):
            return bug(right, *args, **kwargs) if is_spread() else right(*args, **kwargs)

        monkeypatch.setattr(owner, name, planted)

    return plant


def double_the_loss(right, self, loss):
    return right(self, loss) * 2


def own_norm(right, self):
    self._group = None
    return right(self)


def own_count(right, pending):
    step = right(pending)
    own = sum(int((each.batch[-1][: each.rows] != -100).sum()) for each in step.micro_batches)
    return feed.StepBatch(step.micro_batches, own * dist.get_world_size(), step.samples, step.cursor)


def leave_one_out(right, module, *args):
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["blocks.1.mlp.up.weight"])
    return right(module, *args)


def test_keyed_masks_that_depend_on_the_rank(plant):
    def own_keys(right, places):
        return right(places) + np.uint64(dist.get_rank())

    plant(cursor.SamplePositions, "keys", own_keys)
    assert finding_on("ddp", job="keyed_dropout").step == 0


def test_mean_of_means_over_ranks(plant):
    plant(feed._Pending, "finish", own_count)
    finding = finding_on("ddp+accumulation=2")
    assert finding.cause == "mean of means"
    assert "average over ranks" in finding.evidence
    assert finding.step == 0


def test_mean_of_means_over_micro_batches(plant):
    def own_mean(right, self, micro_batch, weight):
        count = int((micro_batch.batch[-1][: micro_batch.rows] != -100).sum())
        return right(self, micro_batch, 1 / 2 / count)  # DDP averages over the ranks, the two micro-batches we do

    plant(plain.PlainStep, "_backward", own_mean)
    finding = finding_on("ddp+accumulation=2")
    assert finding.cause == "mean of means"
    assert "micro-batches of all ranks" in finding.evidence


def test_missing_all_reduce_on_one_parameter(plant):
    plant(apply, "replicate", leave_one_out)
    finding = finding_on("ddp")
    assert finding.cause == "missing all-reduce"
    assert finding.parameter == "blocks.1.mlp.up.weight"
    assert finding.step == 1  # all gradients of the first step are summed by hand, after a look at them
    assert finding.ranks == (0, 1)


def test_double_loss_scaling(plant):
    plant(update.NormedUpdate, "scale", lambda right, self, loss: right(self, loss) * dist.get_world_size())
    finding = finding_on("zero3")
    assert finding.cause == "double loss scaling"
    assert "2 times" in finding.evidence
    assert "the data-parallel size" in finding.evidence


@pytest.mark.representative("unsynced parameter", "per-rank clipping")
@pytest.mark.parametrize(
    ("plan", "bug", "cause"),
    [
        ("zero3", (update.NormedUpdate, "scale", double_the_loss), "double loss scaling"),
        ("ddp", (apply, "replicate", leave_one_out), "missing all-reduce"),
        ("ddp", (feed._Pending, "finish", own_count), "mean of means"),
        ("zero3", (norm.GradNorm, "__call__", own_norm), "un-synced norm clipping"),
    ],
    ids=["gradient x2", "unsynced parameter", "mean of means", "per-rank clipping"],
)
def test_bugs_under_bf16_are_caught_by_gradient_and_norm_and_named_in_fp64(plant, plan, bug, cause):
    plant(*bug)
    verdict = verdict_on(f"{plan}+precision=bf16")
    assert (verdict.status, [finding.cause for finding in verdict.findings]) == ("failed", [cause])
    assert verdict.worst.beyond > 2


def test_a_bug_that_only_lower_precision_has_is_reported_as_such(plant):
    def double_in_bf16(right, self, loss):
        return right(self, loss) * (1 if loss.dtype == torch.float64 else 2)

    plant(update.NormedUpdate, "scale", double_in_bf16)
    finding = finding_on("ddp+precision=bf16")
    assert finding.cause == "wrong in bf16 alone"


def changed_gradients(change):
    """Return a bug that changes each gradient of a rank after its last backward pass."""

    def bug(right, self, batches, weight):
        result = right(self, batches, weight)
        for name, parameter in apply.unwrap(self.model).named_parameters():
            parameter.grad = change(name, parameter.grad)
        return result

    return bug


def test_gradients_rounded_to_bf16(plant):
    rounded = changed_gradients(lambda name, gradient: gradient.bfloat16().to(gradient.dtype))
    plant(plain.PlainStep, "_accumulate", rounded)
    finding = finding_on("ddp")
    assert finding.cause == "gradients in lower precision"
    assert "rounding to bf16" in finding.evidence


def test_scaled_gradient_of_one_parameter(plant):
    router = "blocks.1.mlp.up.weight"
    scaled = changed_gradients(lambda name, gradient: gradient * 2 if name == router else gradient)
    plant(plain.PlainStep, "_accumulate", scaled)
    finding = finding_on("ddp")
    assert (finding.cause, finding.parameter, finding.step) == ("scaled gradient", router, 0)
    assert "2 times" in finding.evidence


def test_a_weight_that_is_tied_too_late(monkeypatch):
    def untie(module, plan, place, meta_model):
        head = apply.unwrap(module).head
        if place.layout.world_size > 1:
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
        return module

    monkeypatch.setattr(apply, "TRANSFORMS", (*apply.TRANSFORMS, untie))
    finding = finding_on("ddp")
    assert (finding.cause, finding.parameter) == ("tied weight trained apart", "embed.weight")
    assert "head.weight is a separate parameter" in finding.evidence


def test_a_bias_that_every_tensor_parallel_rank_adds(plant):
    def add_to_shares(right, module, x, bias):
        output = right(module, x, bias)
        is_row = bias is None and module.bias is not None
        # Both shares together add it once, and the module once more after the sum. Its gradient comes from there.
        return output + module.bias.to_local().detach() / dist.get_world_size() if is_row else output

    plant(tensor, "_linear", add_to_shares)
    finding = finding_on("tp")
    assert finding.cause == "bias added several times"
    assert "2 times" in finding.evidence


def test_positions_that_begin_anew_in_each_context_parallel_slice(plant):
    def from_zero(right, module, group):
        inner = module.forward
        return lambda tokens: inner(tokens, position_ids=torch.arange(tokens.shape[1])[None])

    plant(context, "_with_positions", from_zero)
    finding = finding_on("cp")
    assert (finding.cause, finding.step, finding.ranks) == ("wrong positions", 0, (1,))


def test_local_buffers_that_forward_reads():
    finding = finding_on("ddp", job="local_statistics")
    assert (finding.cause, finding.parameter, finding.ranks) == ("local buffers", "0.mean", (0, 1))


def test_wrong_shard_of_a_tied_weight(monkeypatch):
    def swap(module, plan, place, meta_model):
        weight = module.embed.weight
        if isinstance(weight, DTensor):
            rows = weight.full_tensor().roll(len(weight) // 2, 0).chunk(2)[place.rank]
            weight.to_local().data.copy_(rows)
        return module

    monkeypatch.setattr(apply, "TRANSFORMS", (*apply.TRANSFORMS, swap))
    finding = finding_on("zero3")
    assert finding.cause == "wrong shard of a tied weight"
    assert finding.parameter == "embed.weight"
    assert "head.weight" in finding.evidence
    assert "1 at 0, 0 at 1" in finding.evidence


def test_stale_buffers(plant):
    plant(BatchNorm, "_track", lambda right, self, *stats: right(self, *stats) if dist.get_rank() == 0 else None)
    finding = finding_on("ddp", job="batch_norm")
    assert finding.cause == "stale buffers"
    assert finding.ranks == (1,)
    assert finding.parameter.startswith("1.")


def test_stale_buffers_of_a_job_whose_noise_the_optimizer_amplifies(plant):
    plant(BatchNorm, "_track", lambda right, self, *stats: right(self, *stats) if dist.get_rank() == 0 else None)
    finding = finding_on("ddp", job="amplified")
    assert (finding.cause, finding.ranks) == ("stale buffers", (1,))


def test_weights_beside_amplified_noise_keep_their_sharp_limit(plant):
    def decay_twice(right, self, *args, **kwargs):
        self.param_groups[0]["params"][0].data.mul_(1 - 1e-7)
        return right(self, *args, **kwargs)

    plant(torch.optim.AdamW, "step", decay_twice)
    verdict = verdict_on("ddp", job="amplified")
    assert (verdict.status, verdict.left_out) == ("failed", 16)
    assert verdict.findings[0].cause == "different updates"
    assert verdict.first.limit < 1e-8


def test_an_evaluation_that_counts_padding(plant):
    def count_batches(right, *args, **kwargs):
        found = right(*args, **kwargs)
        return {**found, "loss/count": 20.0 if "loss/count" in found else 0.0}

    plant(plain.PlainStep, "measure", count_batches)
    finding = finding_on("ddp", job="evaluated")
    assert finding.cause == "wrong evaluation"
    assert verdict_on("ddp", job="evaluated").first.kind == "evaluation"


def test_a_metric_that_is_averaged_per_rank(plant):
    def mean_of_ranks(right, self, values):
        mean = values["accuracy"] / values["accuracy/count"]
        return right(self, {**values, "accuracy": mean, "accuracy/count": 1.0})

    plant(World, "sum", mean_of_ranks)
    verdict = verdict_on("ddp", job="evaluated")
    (finding,) = verdict.findings
    assert (finding.cause, finding.ranks) == ("wrong evaluation", (0, 1))
    assert "the accuracy over the test split" in finding.evidence
    assert (verdict.first.kind, verdict.first.name) == ("metric", "accuracy")


def test_rows_that_only_a_short_step_loses(plant):
    def lose_a_row(right, self, step):
        spans = right(self, step)
        short = self.rows_of_step(step) < self.batch_size
        return [(start, stop - 1) if short else (start, stop) for start, stop in spans]

    plant(slices.Slices, "spans", lose_a_row)
    assert finding_on("ddp", job="divisible").cause == "other batches"


def spoil_moments(right, self, batch):
    report = right(self, batch)
    if batch.samples < 40:
        for state in self.optimized.optimizer.state.values():
            state["exp_avg"].mul_(2)
    return report


def keep_largest_weight(right, self, loss, weight):
    self.largest = max(weight, getattr(self, "largest", 0.0))
    return right(self, loss, self.largest)


def repeat_epoch(right, places, *, seed, epoch, length):
    return right(places, seed=seed, epoch=0, length=length)


@pytest.mark.parametrize(
    ("bug", "cause"),
    [
        ((plain.PlainStep, "__call__", spoil_moments), "different updates"),
        ((plain.PlainStep, "_backpropagate", keep_largest_weight), "double loss scaling"),
        ((loaders, "sample_ids", repeat_epoch), "other batches"),
    ],
    ids=["optimizer moments", "normalizer", "position in the data"],
)
def test_state_that_a_short_step_spoils_shows_in_the_full_step_after_it(plant, bug, cause):
    plant(*bug)
    report = verify(f"{JOBS}:batch_norm", ["ddp"], nproc=2)
    (finding,) = report.verdicts[0].findings
    assert (finding.cause, finding.step) == (cause, report.steps - 1)


def test_skipped_last_micro_batch(plant):
    plant(plain.PlainStep, "_accumulate", lambda right, self, batches, weight: right(self, batches[:-1], weight))
    finding = finding_on("ddp+accumulation=5")
    assert finding.cause == "skipped last micro-batch"
    assert finding.step == 0


def test_last_micro_batch_that_the_feed_forgot(plant):
    def forget(right, pending):
        step = right(pending)
        return feed.StepBatch(step.micro_batches[:-1], step.denominator, step.samples, step.cursor)

    plant(feed._Pending, "finish", forget)
    assert finding_on("ddp+accumulation=5").cause == "skipped last micro-batch"


def test_unsynced_norm_clipping(plant):
    plant(norm.GradNorm, "__call__", own_norm)
    finding = finding_on("zero3")
    assert finding.cause == "un-synced norm clipping"
    assert finding.step == 0
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize(("job", "module"), [("tensor_dropout", "0.inner"), ("attention_dropout", "0")])
def test_equal_dropout_seeds_across_tensor_parallel_ranks(plant, job, module):
    plant(ShardedRandom, "enter", lambda right, self: None)
    finding = finding_on("tp", job=job)
    assert finding.cause == "equal dropout seeds across tensor-parallel ranks"
    assert finding.parameter == module
    assert finding.ranks == (0, 1)


def test_different_dropout_seeds_outside_the_sharded_region(plant):
    plant(ShardedRandom, "leave", lambda right, self: None)
    finding = finding_on("tp", job="tensor_dropout")
    assert finding.cause == "different dropout seeds outside the sharded region"


@pytest.mark.representative("ddp")
@pytest.mark.parametrize("plan", ["ddp", "zero3", "ddp+precision=bf16"])
def test_equal_dropout_seeds_across_data_parallel_ranks(plant, plan):
    plant(Layout, "draw_index", lambda right, self, rank: 0)
    finding = finding_on(plan, job="with_dropout")
    assert finding.cause == "equal dropout seeds across data-parallel ranks"
    assert (finding.parameter, finding.ranks) == ("1", (0, 1))


@pytest.mark.representative("torch_attention")
@pytest.mark.parametrize("job", ["torch_attention", "attention_dropout", "drop_path"])
def test_equal_seeds_of_dropout_inside_of_attention_and_of_stochastic_depth(plant, job):
    plant(Layout, "draw_index", lambda right, self, rank: 0)
    finding = finding_on("ddp", job=job)
    assert finding.cause == "equal dropout seeds across data-parallel ranks"
    assert (finding.parameter, finding.ranks) == ("0", (0, 1))


@pytest.mark.parametrize(
    ("plan", "job"),
    [("tp", "tensor_dropout"), ("ddp", "with_dropout"), ("tp", "attention_dropout"), ("zero3", "torch_attention")],
)
def test_sound_dropout_masks_are_not_accused(plan, job):
    assert verdict_on(plan, job=job).status == "passed"


def test_ranks_that_read_the_same_rows(plant):
    def rows_of_rank_0(right, self, step):
        return right(slices.Slices(**{**vars(self), "dp_rank": 0}), step)

    plant(slices.Slices, "spans", rows_of_rank_0)
    finding = finding_on("ddp")
    assert finding.cause == "other batches"
    assert finding.step == 2  # the short step, whose rows are distributed by spans
    assert "read by no rank" in finding.evidence


def test_other_initial_weights(monkeypatch):
    def disturb(module, plan, place, meta_model):
        if place.rank == 1:
            with torch.no_grad():
                module.module.head.weight[3, 2] += 1e-3
        return module

    monkeypatch.setattr(apply, "TRANSFORMS", (*apply.TRANSFORMS, disturb))
    finding = finding_on("ddp")
    assert finding.cause == "other initial weights"
    assert finding.parameter == "embed.weight"


def test_a_combination_that_trains_wrongly_without_an_error_is_caught(monkeypatch):
    monkeypatch.setattr(
        pipeline, "_check_split_backward", lambda plan: None
    )  # else it is refused before any process starts
    plan = "pp2.shard2+accumulation=4+pipeline.schedule=interleaved_zero_bubble"
    assert verdict_on(plan, job="untied", nproc=4).status == "failed"


def leave_peers_waiting(right, self, *args):
    if dist.get_rank() == 1:
        time.sleep(3600)
    return right(self, *args)


def test_a_rank_that_hangs_ends_its_plan_and_every_rank_is_located(plant, monkeypatch):
    monkeypatch.setattr(pulse, "LEAST_S", 2.0)
    plant(plain.PlainStep, "_accumulate", leave_peers_waiting)
    finding = finding_on("ddp")
    assert finding.cause == "hang"
    assert f"rank 1 is at {__file__}" in finding.evidence
    assert "leave_peers_waiting" in finding.evidence
    assert finding.ranks == (0, 1)


def test_a_rank_that_hangs_with_dropout_on_ends_its_plan_as_well(plant, monkeypatch):
    monkeypatch.setattr(pulse, "LEAST_S", 2.0)
    plant(torch.nn.Dropout, "forward", lambda right, self, x: leave_peers_waiting(right, self, x) if self.p else x)
    finding = finding_on("ddp", job="with_dropout")
    assert (finding.cause, finding.ranks) == ("hang", (0, 1))
    assert "leave_peers_waiting" in finding.evidence


@pytest.mark.prove
def test_a_hang_in_a_later_step_ends_a_compiled_plan(plant, monkeypatch):
    def hang_in_the_second_full_step(right, self, batch):
        self.full_steps = getattr(self, "full_steps", 0) + (batch.samples == 40)
        return leave_peers_waiting(right, self, batch) if self.full_steps == 2 else right(self, batch)

    monkeypatch.setattr(pulse, "LEAST_S", 2.0)
    assert verdict_on("ddp+compile=blocks").status == "passed"
    plant(plain.PlainStep, "__call__", hang_in_the_second_full_step)
    finding = finding_on("ddp+compile=blocks")
    assert (finding.cause, finding.ranks) == ("hang", (0, 1))
    assert "leave_peers_waiting" in finding.evidence


def test_random_numbers_that_no_switch_stops():
    finding = finding_on("ddp", job="attending")
    assert finding.cause == "random numbers"
    assert finding.evidence.startswith("0 samples random numbers")  # the module of that name
    assert "--set masks=keyed" in finding.evidence


def test_non_deterministic_operation():
    finding = finding_on("ddp", job="restless")
    assert finding.cause == "non-deterministic operation"
