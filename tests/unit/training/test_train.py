"""Training end to end in this process or on forked ranks: length, evaluation, probe, precision, run directory."""

import json
import math
import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import shardwise as sw
from refusals import refuses
from shardwise.engines.engine import require_supported
from shardwise.errors import TrainingError
from shardwise.plans import Communication, Plan
from shardwise.runs import EventLog, RunDirectory
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loop import run_loop


class Points(Dataset):
    """A line with noise that depends on the index alone."""

    def __init__(self, length=50):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        x = torch.tensor([index / self.length])
        return x, 3 * x + 1


def make_job(**changes):
    fields = {
        "model": lambda: nn.Linear(1, 1),
        "data": lambda split: Points(50) if split == "train" else Points(31),
        "loss": sw.losses.squared_error,
        "optimizer": sw.sgd(lr=0.1),
        "batch_size": 12,
        "epochs": 2,
    }
    return sw.Job(**{**fields, **changes})


def trained(world, job, *, accumulation=1, **plan_changes):
    plan = Plan.preset("ddp", world.size, batch_size=job.batch_size, accumulation=accumulation)
    events = []
    report, step = run_loop(
        job, Plan(**{**vars(plan), **plan_changes}), world, EventLog(None, events.append), Timeline()
    )
    return report, sw.unwrap(step.model), events


def in_one_process(job, **plan_changes):
    return run_ranks(trained, 1, job, **plan_changes)[0]


def test_epochs_steps_and_tokens_give_the_same_training():
    by_epochs = in_one_process(make_job(epochs=2))[0]
    by_steps = in_one_process(make_job(epochs=None, steps=10))[0]
    by_tokens = in_one_process(make_job(epochs=None, tokens=120))[0]
    assert by_epochs.steps == by_steps.steps == by_tokens.steps == 10
    assert by_epochs.loss == by_steps.loss == by_tokens.loss
    assert by_epochs.samples == 100


class NamedPoints(Points):
    """The same points as dicts."""

    def __init__(self, target="y"):
        super().__init__()
        self.target = target

    def __getitem__(self, index):
        return dict(zip(("input", self.target), super().__getitem__(index), strict=True))


class NamedLinear(nn.Linear):
    """A layer that takes all columns of a dict batch."""

    def __init__(self):
        super().__init__(1, 1)

    def forward(self, input, **_):  # noqa: A002 - as torch names it
        return super().forward(input)


REFUSED_JOBS = {
    "vector loss": (
        {"loss": sw.Loss(sum=lambda output, batch: (output - batch[-1]).square())},
        r'Loss\.sum .*a tensor of shape \[6, 1\].*: return the sum over all rows.*reduction="sum"',
    ),
    "loss that is a number": (
        {"loss": sw.Loss(sum=lambda output, _: output.sum().item())},
        r"Loss\.sum .*got float",
    ),
    "vector metric": (
        {"metrics": {"error": sw.Metric(sum=lambda output, batch: output - batch[-1])}},
        r"Metric\.sum .*a tensor of shape \[\d+, 1\]",
    ),
    "data loader": (
        {"data": lambda _: DataLoader(Points(50))},
        r"Job\.data must return a dataset, got a DataLoader for split 'train': return its dataset",
    ),
    "data loader for the test split": (
        {"data": lambda split: Points(50) if split == "train" else DataLoader(Points(50))},
        "DataLoader for split 'test'",
    ),
    "factory of torch's schedulers": (
        {"schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)},
        r"Job\.schedule\(0, 10\) raised TypeError: .*takes 1 positional argument.*\(step, total\) -> factor",
    ),
    "schedule that returns nothing": ({"schedule": lambda *_: None}, r"Job\.schedule\(0, 10\) .*NoneType"),
    "everything frozen": ({"model": lambda: nn.Linear(1, 1).requires_grad_(False)}, "no trainable parameter"),
    "dict batches": (
        {"data": lambda _: NamedPoints(), "model": NamedLinear},
        "dict with the keys input, y, but squared_error reads .*: return .inputs..., target.",
    ),
    "dict batches with labels": (
        {
            "data": lambda _: NamedPoints(target="labels"),
            "model": NamedLinear,
            "loss": sw.losses.cross_entropy,
        },
        r"dict with the keys input, labels, but cross_entropy reads .*: use sw\.losses\.labels",
    ),
}


def refusals(world):
    """Return by name how each job that cannot be trained is refused; every rank refuses it alike."""
    found = {}
    for name, (changes, _) in REFUSED_JOBS.items():
        try:
            trained(world, make_job(**changes))
        except Exception as error:  # noqa: BLE001 - the test distinguishes a refusal from a crash
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_jobs_that_cannot_be_trained_are_refused_in_one_sentence():
    for found in run_ranks(refusals, 2):
        for name, (_, sentence) in REFUSED_JOBS.items():
            assert re.match(f"(JobError|DataError): .*{sentence}", found.get(name, "trained")), (name, found.get(name))
            assert "\n" not in found[name]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_counts_every_sample_once(ranks):
    def body(world):
        seen = []

        def note(_output, batch):
            seen.extend((batch[0] * 31).round().flatten().int().tolist())
            return batch[0].sum()

        report, _, _ = trained(world, make_job(epochs=1, metrics={"seen": sw.Metric(sum=note)}))
        return seen, report.evaluation

    results = run_ranks(body, ranks)
    assert sorted(i for seen, _ in results for i in seen) == list(range(31))
    assert results[0][1]["seen"] == pytest.approx(sum(range(31)) / 31 / 31)


def test_evaluation_leaves_training_alone():
    """Frozen norms stay frozen, and the global random state is training's."""

    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    def weights(test_set):
        job = make_job(
            model=lambda: Frozen(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)),
            data=lambda split: Points() if split == "train" else test_set,
        )
        return run_ranks(lambda world: trained(world, job)[1].state_dict(), 1)[0]

    without, with_one = weights(None), weights(Points(31))
    assert all(torch.equal(without[name], with_one[name]) for name in without)


def test_one_model_is_evaluated_when_batch_statistics_are_local():
    job = make_job(model=lambda: nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))

    def body(world):
        report, module, _ = trained(world, job, batch_norm="local")
        return report.evaluation["loss"], module[1].running_mean

    (loss, mean), (other_loss, other_mean) = run_ranks(body, 2)
    assert loss == other_loss
    assert torch.equal(mean, other_mean)


def test_evaluation_of_fewer_samples_than_ranks():
    job = make_job(data=lambda split: Points(50) if split == "train" else Points(2))
    report = run_ranks(lambda world: trained(world, job)[0], 3)[0]
    assert math.isfinite(report.evaluation["loss"])


class HalfUsed(nn.Module):
    """Rank 1 alone leaves a part of the model unused."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.main, self.extra = rank, nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        return self.main(x) if self.rank == 1 else self.main(x) + self.extra(x)


def test_parameters_without_gradient_on_one_rank_are_named_on_every_rank():
    def body(world):
        with refuses("train.unused-parameters", "rank 1: extra.bias, extra.weight"):
            trained(world, make_job(model=lambda: HalfUsed(world.rank)))
        return "refused"

    assert run_ranks(body, 2) == ["refused", "refused"]


def test_unused_parameters_are_allowed_by_the_plan():
    def body(world):
        plan = {"communication": Communication(find_unused_parameters=True)}
        _, _, events = trained(world, make_job(model=lambda: HalfUsed(world.rank)), **plan)
        return [event["text"] for event in events if event["kind"] == "note"]

    assert "extra.bias" in run_ranks(body, 2)[0][0]


def test_non_finite_gradient_skips_the_step_and_is_noted():
    class Poisoned(Points):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return (x * math.nan, y) if index == 7 else (x, y)

    job = make_job(data=lambda split: Poisoned() if split == "train" else None, clip_norm=1.0)
    _, module, events = in_one_process(job)
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert any("loss of step" in event.get("text", "") for event in events)


def test_learning_rate_is_a_function_of_the_optimizer_step_alone():
    def rates(world, accumulation):
        seen = []
        job = make_job(schedule=sw.schedules.Linear(warmup=2), on_step=lambda context: seen.append(context.lr))
        trained(world, job, accumulation=accumulation)
        return seen

    one = run_ranks(rates, 1, 1)[0]
    assert len(one) == 10
    assert run_ranks(rates, 2, 3)[0] == one


def test_weights_are_loaded_before_training(tmp_path):
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "w.pt")
    job = make_job(weights=str(tmp_path / "w.pt"), optimizer=sw.sgd(lr=0.0))
    _, module, _ = in_one_process(job)
    assert torch.equal(module.weight, torch.load(tmp_path / "w.pt")["weight"])


def test_weights_of_another_model_are_refused(tmp_path):
    torch.save({"other": torch.zeros(1)}, tmp_path / "w.pt")
    with refuses("model.weights-keys-mismatch", "other"):
        in_one_process(make_job(weights=str(tmp_path / "w.pt")))


def test_weights_file_that_holds_code_is_refused(tmp_path):
    torch.save({"weight": nn.Linear(1, 1)}, tmp_path / "w.pt")
    with refuses("model.weights-unreadable"):
        in_one_process(make_job(weights=str(tmp_path / "w.pt")))


class Own(nn.Module):
    """A model that returns its own mean loss, as transformers' do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x, y):
        return {"loss": (self.linear(x) - y).square().mean()}


def test_model_with_its_own_mean_loss_is_weighed_right():
    def job():
        loss = sw.losses.returned_by_model(count=lambda batch: batch["x"].numel())
        collate = lambda rows: {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}  # noqa: E731
        return make_job(model=Own, loss=loss, collate=collate)

    one = in_one_process(job())[0]
    for ranks, accumulation in [(2, 3), (3, 2)]:
        report = run_ranks(
            lambda world, accumulation=accumulation: trained(world, job(), accumulation=accumulation)[0], ranks
        )[0]
        assert report.loss == pytest.approx(one.loss, rel=1e-5)


def test_stream_needs_steps_and_trains_with_them():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(Points(50))

    data = lambda split: Stream() if split == "train" else None  # noqa: E731
    with refuses("data.stream-without-steps", "steps="):
        in_one_process(make_job(data=data))
    reports = run_ranks(lambda world: trained(world, make_job(data=data, epochs=None, steps=8))[0], 2)
    assert reports[0].steps == 8
    assert reports[0].loss == reports[1].loss


def test_bf16_trains_close_to_fp32():
    bf16 = sw.Plan().precision.__class__(compute="bf16")
    fp32 = in_one_process(make_job(epochs=10))[0].evaluation["loss"]
    assert in_one_process(make_job(epochs=10), precision=bf16)[0].evaluation["loss"] == pytest.approx(fp32, rel=0.2)


def test_local_batch_norm_differs_from_one_process_and_sync_does_not():
    job = make_job(
        model=lambda: nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        data=lambda split: Points() if split == "train" else None,
    )
    one = in_one_process(job)[0].loss
    assert run_ranks(lambda world: trained(world, job, batch_norm="sync")[0].loss, 2)[0] == pytest.approx(one, rel=1e-4)
    assert run_ranks(lambda world: trained(world, job, batch_norm="local")[0].loss, 2)[0] != pytest.approx(
        one, rel=1e-3
    )


def test_plan_for_another_batch_or_world_is_refused():
    with refuses("plan.batch-size-mismatch", "12 samples", "24"):
        run_ranks(lambda world: sw.train(make_job(batch_size=24), Plan.preset("ddp", 1, batch_size=12), world), 1)
    with refuses("plan.world-size-mismatch", "plan.refit(1)"):
        run_ranks(lambda world: sw.train(make_job(), Plan.preset("ddp", 2, batch_size=12), world), 1)


def test_dataset_without_length_is_refused():
    class NoLength(Dataset):
        def __getitem__(self, index):
            return index

    with refuses("data.dataset-without-length", "__len__"):
        in_one_process(make_job(data=lambda split: NoLength()))


def test_run_directory_holds_events_timeline_and_report(tmp_path):
    run = RunDirectory(tmp_path)
    plan = Plan.preset("ddp", 2, batch_size=12)
    run_ranks(lambda world: sw.train(make_job(), plan, world, run=run, show_progress=False), 2)
    report = json.loads(run.report_json.read_text())
    assert report["result"]["steps"] == 10
    assert [phase["name"] for phase in report["start_up"]] == ["model and data", "first step"]
    assert "test loss" in run.report_markdown.read_text()
    for rank in range(2):
        events = [json.loads(line) for line in run.events(rank).read_text().splitlines()]
        assert sum(len(event.get("losses", [])) for event in events) == 10


def test_own_loop_over_a_parallel_model():
    def body(world):
        model = sw.parallelize(nn.Linear(1, 1), Plan.preset("ddp", world.size), world)
        model(torch.full((1, 1), float(world.rank + 1))).sum().backward()
        return sw.unwrap(model).weight.grad.item()

    assert run_ranks(body, 2) == [1.5, 1.5]


def test_own_loop_over_a_step():
    def body(world):
        step = sw.build_step(make_job(), Plan.preset("ddp", world.size, batch_size=12), world)
        return [float(step(batch).loss_share) for batch in step.feed]

    shares = run_ranks(body, 2)
    assert len(shares[0]) == 10
    assert shares[0] != shares[1]


def test_byt5_trains_on_two_ranks_like_on_one():
    class Reverse(Dataset):
        """Bytes and their reverse, padded to different lengths so that ranks count different numbers of tokens."""

        def __len__(self):
            return 26

        def __getitem__(self, index):
            tokens = torch.randint(3, 100, (4 + index % 3,), generator=torch.Generator().manual_seed(index))
            pad = 6 - len(tokens)
            return {
                "input_ids": nn.functional.pad(tokens, (0, pad)),
                "attention_mask": nn.functional.pad(torch.ones_like(tokens), (0, pad)),
                "labels": nn.functional.pad(tokens.flip(0), (0, pad), value=-100),
            }

    job = make_job(
        model=lambda: sw.models.byt5("byt5-tiny", dropout_rate=0.0),
        data=lambda split: Reverse() if split == "train" else None,
        loss=sw.losses.returned_by_model(count=lambda batch: (batch["labels"] != -100).sum()),
        optimizer=sw.adamw(lr=1e-3),
        batch_size=12,
    )
    one, two = in_one_process(job)[0], run_ranks(lambda world: trained(world, job)[0], 2)[0]
    assert two.loss == pytest.approx(one.loss, rel=1e-4)


def test_optimizer_sees_the_models_own_names_at_any_number_of_ranks():
    def names(world):
        seen = []

        def optimizer(named_parameters):
            named = list(named_parameters)
            seen.extend(name for name, _ in named)
            return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

        sw.build_step(make_job(optimizer=optimizer), Plan.preset("ddp", world.size, batch_size=12), world)
        return seen

    assert run_ranks(names, 1)[0] == run_ranks(names, 2)[0] == ["weight", "bias"]


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": False},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": False},
        {"broadcast_buffers": True},
        {"bucket_mb": 0.001},
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_communication_option_trains_like_one_process(options, accumulation):
    job = make_job(model=lambda: nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    one = in_one_process(job)[0].loss
    sync = "every" if "static_graph" in options else "last"
    plan = {"accumulation": accumulation, "communication": Communication(**options), "gradient_sync": sync}
    assert run_ranks(lambda world: trained(world, job, **plan)[0].loss, 2)[0] == pytest.approx(one, rel=1e-5)


def test_static_graph_with_accumulation_is_refused():
    plan = Plan.preset("ddp", 1, batch_size=12, accumulation=3)
    with refuses("support.static-graph-accumulation", "gradient_sync"):
        require_supported(replace(plan, communication=Communication(static_graph=True)))


def test_parameter_that_nobody_uses_does_not_decay():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(1, 1), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    job = make_job(model=Idle, optimizer=sw.adamw(lr=0.1, weight_decay=0.5))
    plan = {"communication": Communication(find_unused_parameters=True)}
    one = run_ranks(lambda world: trained(world, job)[1].idle.weight, 1)[0]
    two = run_ranks(lambda world: trained(world, job, **plan)[1].idle.weight, 2)[0]
    assert torch.equal(one, two)


@dataclass
class Answer:
    value: torch.Tensor


class Answering(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(1, 1), how

    def forward(self, x):
        return self.how(self.linear(x))


def test_padding_is_removed_from_dataclass_outputs():
    def last_loss(how, value):
        loss = sw.Loss(sum=lambda output, batch: (value(output) - batch[1]).square().sum())
        job = make_job(model=lambda: Answering(how), loss=loss, epochs=1)
        return run_ranks(lambda world: trained(world, job)[0].loss, 1)[0]

    assert last_loss(Answer, lambda output: output.value) == last_loss(lambda value: value, lambda output: output)


def test_output_in_which_padding_cannot_be_recognised_is_refused():
    loss = sw.Loss(sum=lambda output, batch: output.sum())
    job = make_job(model=lambda: Answering(lambda value: value.sum(0, keepdim=True)), loss=loss)
    with refuses("model.output-without-rows", "by_row=False"):
        in_one_process(job)


def test_batches_that_begin_with_text_are_counted():
    class Named(Points):
        def __getitem__(self, index):
            return (f"id{index}", *super().__getitem__(index))

    job = make_job(data=lambda split: Named(), forward=lambda model, batch: model(batch[1]))
    assert math.isfinite(in_one_process(job)[0].evaluation["loss"])


@pytest.mark.parametrize("optimizer", [sw.adamw(lr=0.1), sw.adamw(lr=0.1, fused=False), sw.sgd(lr=0.1)], ids=str)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_non_finite_gradient_is_skipped_on_every_rank_and_counted(optimizer, clip_norm):
    class Poisoned(Points):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return (x * math.nan, y) if index == 7 else (x, y)

    def body(world):
        job = make_job(
            data=lambda split: Poisoned() if split == "train" else None, optimizer=optimizer, clip_norm=clip_norm
        )
        report, module, _ = trained(world, job)
        return report.skipped, module.weight.item()

    (skipped, weight), other = run_ranks(body, 2)
    assert skipped == 2  # sample 7 comes once in each of two epochs
    assert math.isfinite(weight)
    assert other == (skipped, weight)


def test_training_that_learnt_nothing_is_a_failure():
    job = make_job(loss=sw.Loss(sum=lambda output, batch: output.sum() * math.nan))
    with refuses("train.no-finite-gradient", "all 10 steps", kind=TrainingError):
        run_ranks(lambda world: trained(world, job)[0], 2)


def test_count_of_zero_does_not_poison_the_reported_loss():
    loss = sw.losses.returned_by_model(count=lambda batch: 0)
    mean = torch.tensor(math.nan, requires_grad=True)
    assert loss.sum(mean, None) == 0


def test_building_many_steps_makes_one_group():
    def groups(world):
        for _ in range(3):
            sw.build_step(make_job(), Plan.preset("ddp", world.size, batch_size=12), world)
        return len(torch.distributed.distributed_c10d._world.pg_map)

    assert run_ranks(groups, 2)[0] == 2


def test_options_that_start_ranks_are_refused_inside_a_world():
    plan = Plan.preset("ddp", 1, batch_size=12)
    with refuses("train.option-inside-world", "nproc"):
        run_ranks(lambda world: sw.train(make_job(), plan, world, nproc=2, save_every=1), 1)
