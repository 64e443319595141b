"""A step in MLX gives the numbers of a loop written by hand, and of torch."""

import dataclasses

import mlx.core as mx
import pytest
import torch
from data.test_corpus import corpus_job, packed_rows
from engines.mlx.jobs import KINDS, Net, Picture, longer_job, make_job, make_plan, run, save_first_weights, values_of
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import shardwise as sw
from refusals import refuses
from shardwise.engines.mlx import functions  # noqa: F401 - registers the losses for arrays
from shardwise.job.schedules import Cosine
from shardwise.training.build import build_step
from shardwise.training.evaluate import evaluate

pytestmark = pytest.mark.usefixtures("uncompiled")


def trained(job, num_steps=None, *, note=lambda _: None, **options):
    """Train in a world of one; returns the losses and the step."""
    with sw.world() as world:
        step = build_step(job, make_plan(job, **options), world, note=note)
        return run(step, num_steps), step


def by_both(tmp_path, kind, num_steps=10, *, accumulation=1, precision="fp32", **options):
    """Train both forms from the same weights; returns losses and values of MLX, then of torch."""
    weights = save_first_weights(tmp_path / "first.pt", kind)
    found = []
    for engine in ("mlx", "torch"):
        job = make_job(kind, engine=engine, weights=weights, **options)
        losses, step = trained(job, num_steps, engine=engine, accumulation=accumulation, precision=precision)
        found += [torch.tensor(losses, dtype=torch.float64), values_of(step)]
    return found


def assert_close(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        torch.testing.assert_close(
            ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n} {text}"
        )


def test_losses_are_those_of_a_plain_loop_in_mlx():
    mx.enable_compile()
    job = make_job(samples=32, epochs=3)
    losses, _ = trained(job)
    mx.random.seed(job.seed)
    model = Net()
    optimizer = optimizers.AdamW(1e-2, weight_decay=0.0, bias_correction=True)
    decaying = optimizers.AdamW(1e-2, weight_decay=0.01, bias_correction=True)
    both = optimizers.MultiOptimizer([decaying, optimizer], [lambda _, parameter: parameter.ndim >= 2])
    both.init(model.trainable_parameters())
    gradient = nn.value_and_grad(model, lambda net, x, y: nn.losses.cross_entropy(net(x), y, reduction="mean"))
    with sw.world() as world:
        batches = list(build_step(job, make_plan(job), world).feed)
    expected = []
    for batch in batches:
        x, y = (mx.array(tensor.numpy()) for tensor in batch.micro_batches[0].batch)
        loss, gradients = gradient(model, x, y)
        both.update(model, gradients)
        mx.eval(loss, model.state, both.state)
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(losses) == 12


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("points", sw.adamw(lr=1e-2, weight_decay=0.1)),
        ("points", sw.sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
        ("sentences", sw.adamw(lr=1e-2)),
        ("pictures", sw.sgd(lr=0.05)),
    ],
)
def test_ten_steps_with_short_batches_accumulated_and_clipped_equal_torch(tmp_path, kind, optimizer):
    ours, our_values, theirs, their_values = by_both(
        tmp_path, kind, optimizer=optimizer, clip_norm=0.5, schedule=Cosine(), accumulation=2
    )
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
    assert_close(our_values, their_values, 1e-5)


def test_in_fp64_ten_steps_equal_torch_to_the_last_digits(tmp_path):
    loss = sw.Loss(sum=lambda output, batch: (output[:, 0] - batch[0][:, 2]).square().sum())  # MLX's exp has 8 digits
    ours, our_values, theirs, their_values = by_both(tmp_path, "points", precision="fp64", loss=loss, accumulation=2)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_close(our_values, their_values, 1e-10)


def test_bf16_computes_near_fp32_and_keeps_fp32_weights():
    exact, _ = trained(make_job("pictures"))
    near, step = trained(make_job("pictures"), precision="bf16")
    assert near != exact
    assert near == pytest.approx(exact, rel=0.05)
    assert {value.dtype for value in step.local_state().values.values()} == {torch.float32}


def test_a_loss_that_counts_nothing_is_refused():
    loss = dataclasses.replace(KINDS["points"][3], count=lambda _: 0)
    with refuses("loss.count-zero", "Loss.count", 0):
        trained(make_job(loss=loss), 1)


def test_a_step_is_traced_once_for_each_number_of_rows():
    mx.enable_compile()
    calls = []

    class Counting(Net):
        def __call__(self, x):
            calls.append(len(x))
            return super().__call__(x)

    losses, _ = trained(make_job(model=Counting, epochs=4))  # 8 rows, and 5 at the end of an epoch
    assert len(losses) == 20
    assert calls == [8, 5]


def test_names_beside_tensors_are_those_of_each_batch_and_their_cost_is_reported():
    mx.enable_compile()
    seen, notes = [], []

    def forward(model, batch):
        seen.append(batch["name"][0])
        return model(batch["x"])

    points = make_job().data("train")
    rows = [{"x": x, "name": f"file{number}", "y": y} for number, (x, y) in enumerate(points)]
    loss = sw.Loss(sum=lambda output, batch: sw.losses.cross_entropy.sum(output, (batch["y"],)))
    job = make_job(data=lambda _: rows, forward=forward, loss=loss, metrics={})
    losses, _ = trained(job, note=notes.append)
    assert losses == pytest.approx(trained(make_job())[0], rel=1e-6)
    assert len(set(seen)) == len(losses)
    assert notes == ["batches contain str besides tensors: forward and backward are not compiled"]


def test_a_loss_over_whole_batches_gets_arrays_in_training_and_evaluation():
    def total(output, batch):
        return nn.losses.cross_entropy(output, batch[-1], reduction="sum")

    job = make_job(loss=sw.Loss(sum=total, count=lambda batch: batch[-1].numel(), by_row=False))
    with sw.world() as world:
        plan = make_plan(job)
        step = build_step(job, plan, world)
        losses = run(step)
        found = evaluate(step, job.data("test"))
    assert losses == pytest.approx(trained(make_job())[0], rel=1e-6)
    assert found["loss"] < losses[0]


def test_statistics_of_a_batch_norm_inside_a_checkpoint_move_once():
    class Again(Picture):
        def __call__(self, x):
            block = nn.Sequential(self.conv, self.norm)
            return self.head(nn.relu(nn.utils.checkpoint(block)(x.transpose(0, 2, 3, 1))).mean((1, 2)))

    plain, step = trained(make_job("pictures"), 3)
    losses, again = trained(make_job("pictures", model=Again), 3)
    assert losses == pytest.approx(plain, rel=1e-5)
    assert_close(values_of(again), values_of(step), 1e-5)


def test_an_infinite_gradient_leaves_weights_and_states_alone():
    def data(split):
        x = torch.randn(8, 6)
        x[5] = torch.inf
        return torch.utils.data.TensorDataset(x, torch.zeros(8).long()) if split == "train" else None

    job = make_job(data=data, steps=1, epochs=None)
    with sw.world() as world:
        step = build_step(job, make_plan(job), world)
        before = values_of(step)
        report = step(next(iter(step.feed)))
    assert (float(report.skipped), bool(torch.isfinite(report.grad_norm))) == (1.0, False)
    assert_close(values_of(step), before, 0.0)


def test_frozen_parameters_stay_and_have_no_states():
    class Half(Net):
        def __init__(self):
            super().__init__()
            self.a.freeze()

    job = make_job(model=Half)
    with sw.world() as world:
        step = build_step(job, make_plan(job), world)
        before = values_of(step)
        run(step)
        after = values_of(step)
    assert {name for name in after if not torch.equal(before[name], after[name])} >= {"b.weight", "b.bias"}
    assert torch.equal(before["a.weight"], after["a.weight"])
    assert not any(name.startswith("a.weight/") for name in after)
    assert [name for name, each in step.named_parameters() if not each.requires_grad] == ["a.weight", "a.bias"]


def test_a_parameter_that_the_loss_does_not_reach_is_named_and_does_not_decay():
    class Spare(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    notes = []
    job = make_job(model=Spare)
    with sw.world() as world:
        step = build_step(job, make_plan(job), world, note=notes.append)
        before = values_of(step)
        run(step)
    assert torch.equal(values_of(step)["spare.weight"], before["spare.weight"])
    assert ["spare.weight, spare.bias" in note for note in notes] == [True]


@pytest.mark.parametrize(("long", "moves"), [({3}, [True] * 4), ({6}, [False, True, False, False])], ids=str)
def test_a_parameter_moves_in_steps_in_which_some_micro_batch_reaches_it(long, moves):
    job, found, notes = longer_job(long), [], []
    with sw.world() as world:
        step = build_step(job, make_plan(job, accumulation=2), world, note=notes.append)
        for batch in step.feed:
            before = values_of(step)["far.weight"]
            step(batch)
            found.append(not torch.equal(values_of(step)["far.weight"], before))
    assert found == moves
    assert len(notes) == (not moves[0])


def test_an_optimizer_of_mlx_is_taken_as_it_is():
    losses, step = trained(make_job(optimizer=lambda _: optimizers.Lion(1e-3)))
    assert losses[-1] < losses[0]
    assert step.optimized.kind == "Lion"
    assert {"a.weight/m", "a.weight/step"} <= step.local_state().states.keys()


@pytest.mark.parametrize(
    ("optimizer", "refusal"),
    [
        (lambda _: optimizers.SGD(optimizers.cosine_decay(0.1, 5)), ("optimizer.own-schedule",)),
        (lambda _: torch.optim.SGD([torch.zeros(1)]), ("optimizer.not-mlx", "SGD")),
    ],
)
def test_an_optimizer_that_the_step_cannot_drive_is_refused(optimizer, refusal):
    with refuses(*refusal):
        trained(make_job(optimizer=optimizer))


def test_keyed_masks_and_adapters_are_refused():
    with refuses("support.keyed-masks-engine"):
        trained(make_job(masks="keyed"))
    with refuses("support.lora-engine"):
        trained(make_job(lora=sw.Lora(targets=("a",), rank=2)))


def test_a_world_on_gpus_is_refused():
    job = make_job()
    with sw.world() as world:
        elsewhere = dataclasses.replace(world, device=torch.device("cuda", 0), created=False)
        with refuses("support.mlx-device", "sw.world(device='cpu')"):
            build_step(job, make_plan(job), elsewhere)


def test_a_finished_module_is_refused_by_the_job():
    with refuses("job.model-not-factory", "Net"):
        make_job(model=Net())


def test_a_models_own_mean_is_weighed_by_what_it_counts():
    class OwnLoss(Net):
        def __call__(self, x, y):
            return nn.losses.cross_entropy(super().__call__(x), y, reduction="mean")

    own = make_job(model=OwnLoss, forward=lambda model, batch: model(*batch), metrics={})
    own = sw.Job(**{**vars(own), "loss": sw.losses.returned_by_model(lambda batch: len(batch[-1]))})
    expected, _ = trained(make_job(), accumulation=2)
    losses, _ = trained(own, accumulation=2)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_evaluation_leaves_statistics_alone_and_gives_torchs_numbers(tmp_path):
    weights = save_first_weights(tmp_path / "first.pt", "pictures")
    found = []
    for engine in ("mlx", "torch"):
        job = make_job("pictures", engine=engine, weights=weights, optimizer=sw.sgd(lr=0.05))
        with sw.world() as world:
            plan = make_plan(job, engine=engine)
            step = build_step(job, plan, world)
            run(step, 3)
            before = values_of(step)
            found.append(evaluate(step, job.data("test")))
            assert_close(values_of(step), before, 0.0)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_built_in_losses_and_metrics_equal_torchs():
    logits = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0))
    target = torch.randint(0, 7, (4, 5), generator=torch.Generator().manual_seed(0))
    target[1:3, 2:] = -100
    cases = [
        (sw.losses.token_cross_entropy, (None, target)),
        (sw.losses.labels, {"labels": target}),
        (sw.losses.next_token, {"labels": target}),
        (sw.losses.squared_error, (None, logits * 2)),
        (sw.metrics.token_accuracy, (None, target)),
    ]
    for measure, batch in cases:
        here = {key: _array(value) for key, value in batch.items()} if isinstance(batch, dict) else _arrays(batch)
        assert float(measure.sum(_array(logits), here)) == pytest.approx(float(measure.sum(logits, batch)), rel=1e-5)
    rows = (None, target.clamp(min=0)[:, 0])
    ours = sw.losses.cross_entropy.sum(_array(logits[:, 0]), _arrays(rows))
    assert float(ours) == pytest.approx(float(sw.losses.cross_entropy.sum(logits[:, 0], rows)), rel=1e-5)


def _array(tensor):
    return mx.array(tensor.numpy())


def _arrays(tensors):
    return tuple(None if tensor is None else _array(tensor) for tensor in tensors)


def test_both_forms_of_the_jobs_have_the_same_names():
    for ours, theirs, _, _ in KINDS.values():
        names = {name for name, _ in theirs().named_parameters(remove_duplicate=False)}
        assert {name for name, _ in tree_flatten(ours().parameters())} >= names


def test_a_model_in_16_bits_is_refused():
    def model():
        net = Net()
        net.set_dtype(mx.bfloat16)
        return net

    with refuses("model.trained-dtype-mismatch", "a.weight, a.bias, b.weight and 1 more", 16):
        trained(make_job(model=model))


def test_packed_rows_and_unknown_token_ids_are_refused():
    job = dataclasses.replace(make_job("sentences"), data=lambda split: packed_rows() if split == "train" else None)
    with refuses("support.mlx-packed", "torch model"):
        trained(job, 1)
    with refuses("data.token-outside-vocabulary"):
        trained(dataclasses.replace(job, data=corpus_job().data, epochs=None, steps=1), 1)
