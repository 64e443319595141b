"""A compiled region trains as eager steps do: whole on one rank, head and loss on several, with fallbacks."""

import functools
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._inductor import cpp_builder, exc

import shardwise as sw
from jobs import FP64, Points, Pooled, Tokens, points_job, sentences_job, train_split
from refusals import refuses
from shardwise.job import losses
from shardwise.parallel import fused_loss
from shardwise.plans import Plan
from shardwise.plans.rules import padded_vocabulary
from shardwise.testing import run_ranks
from shardwise.torch_private.dynamo import compile_errors
from shardwise.training.step import compiled as step_compiled
from shardwise.training.step.compiled import compiled_region, uncompiled_probe


@pytest.fixture(autouse=True)
def fast_backend(monkeypatch):
    """Compile with aot_eager, which traces forward and backward as inductor does but generates no C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def losses_of(world, **options):
    """Train the sentences, whose last batch is short, and return the losses and the notes."""
    notes = []
    precision, job = options.pop("precision", FP64), options.pop("job", None)
    plan = Plan.preset(options.pop("name", "ddp"), world.size, batch_size=8, precision=precision, **options)
    step = sw.build_step(job or sentences_job(steps=6), plan, world, note=notes.append)
    return [step(batch).loss for batch in step.feed], notes


@pytest.mark.parametrize(
    ("nproc", "options"),
    [
        (1, {"compile": "model"}),
        (1, {"compile": "model", "accumulation": 2, "recompute": "full"}),
        (1, {"compile": "blocks"}),
        (2, {"compile": "blocks"}),
        (2, {"compile": "blocks", "name": "fsdp"}),
        (2, {"compile": "blocks", "name": "fsdp", "recompute": "selective"}),
    ],
    ids=["whole", "whole-recomputed", "loss", "ddp", "fsdp", "fsdp-recomputed"],
)
def test_a_compiled_region_trains_with_the_losses_of_eager_steps(nproc, options):
    ((expected, _),) = run_ranks(losses_of, 1)
    for found, notes in run_ranks(functools.partial(losses_of, **options), nproc):
        assert found == pytest.approx(expected, rel=1e-9)
        assert notes == []


@pytest.mark.parametrize("precision", [FP64, "bf16"], ids=["fp64", "bf16"])
def test_a_region_that_torch_cannot_compile_runs_eagerly_and_names_the_reason(monkeypatch, precision):
    error = compile_errors()("a graph that nobody can lower\nand its stack")

    def fail(*_arguments, **_keywords):
        raise error

    def compiled(function, **_options):
        return fail if function.__name__ == "_loss_sum" else function

    monkeypatch.setattr(torch, "compile", compiled)
    ((found, notes),) = run_ranks(functools.partial(losses_of, compile="model", precision=precision), 1)
    ((expected, _),) = run_ranks(functools.partial(losses_of, precision=precision), 1)
    assert found == expected
    (note,) = notes
    assert note.endswith("a graph that nobody can lower")


@pytest.mark.parametrize(("nproc", "name", "kind"), [(1, "ddp", "model"), (2, "fsdp", "blocks")])
def test_without_a_compiler_on_one_rank_all_train_eagerly_and_say_so(monkeypatch, nproc, name, kind):
    def find():
        if torch.distributed.get_rank() == nproc - 1:
            raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", find)
    ((expected, _),) = run_ranks(losses_of, 1)
    for found, notes in run_ranks(functools.partial(losses_of, name=name, compile=kind), nproc):
        assert found == pytest.approx(expected, rel=1e-9)
        (note,) = notes
        assert f"compile = {kind}" in note
        assert "C++ compiler" in note


class ReadsValue(torch.nn.Module):
    """A block that reads a value of a tensor, at which torch.compile breaks the graph."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.linear(x)
        if float(hidden.detach().sum()) > 1e9:  # the graph break
            hidden = hidden * 2
        return torch.relu(hidden)


def reading_model():
    return torch.nn.Sequential(ReadsValue(), ReadsValue(), torch.nn.Linear(6, 3))


def line_of(text):
    """Return FILE:LINE of the line of this file with `text`."""
    numbers = [number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line]
    return f"{Path(__file__).name}:{numbers[0]}"


@pytest.mark.parametrize(
    ("nproc", "options"),
    [(1, {"compile": "model"}), (2, {"compile": "blocks", "name": "fsdp"})],
    ids=["model", "fsdp"],
)
def test_a_graph_break_is_named_once_with_its_line(nproc, options):
    job = points_job(reading_model, steps=3)
    ((expected, _),) = run_ranks(losses_of, 1, job=job)
    for found, notes in run_ranks(functools.partial(losses_of, job=job, **options), nproc):
        assert found == pytest.approx(expected, rel=1e-9)
        (note,) = notes
        assert f"compile = {options['compile']}: torch.compile breaks the graph" in note
        assert line_of("# the graph break") in note


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["train.py", functools.__file__], "train.py:1"),
        ([losses.__file__, functools.__file__], ""),
        (["train.py", torch.nn.functional.__file__], "train.py:1"),
        (["train.py", torch.nn.modules.module.__file__], ""),
        ([str(Path(functools.__file__).parent / "site-packages" / "einops.py")], "einops.py:1"),
    ],
)
def test_a_graph_break_is_named_by_the_last_line_outside_of_torch_and_the_standard_library(files, named):
    frames = [traceback.FrameSummary(file, 1, "forward") for file in files]
    assert step_compiled._user_line(frames).endswith(named)
    assert bool(step_compiled._user_line(frames)) == bool(named)


def of_own_length(samples):
    """Return a batch whose rows are shortened to a length that depends on the first sample."""
    length = 3 + int(samples[0][1])
    return torch.stack([point[:length] for point, _ in samples]), torch.stack([target for _, target in samples])


def test_batches_of_changing_shape_are_named_once_and_train_on():
    job = points_job(Pooled, Points(96, 6), steps=8, collate=of_own_length)
    ((expected, _),) = run_ranks(losses_of, 1, job=job)
    ((found, notes),) = run_ranks(losses_of, 1, job=job, compile="model")
    assert found == pytest.approx(expected, rel=1e-9)
    (note,) = notes
    assert "because shapes change" in note
    assert "size mismatch at index 1" in note
    assert "Job.collate" in note


class Doubled(torch.nn.Module):
    """Changes the logits after the head."""

    def __init__(self):
        super().__init__()
        self.decoder = sw.models.decoder("llama-tiny", vocab_size=50, context=16)

    def get_output_embeddings(self):
        return self.decoder.head

    def forward(self, *arguments):
        return 2 * self.decoder(*arguments)


def uneven_job():
    """Return a job whose last batch of 7 samples fills the micro-batch of one of two ranks."""
    return sentences_job(data=train_split(Tokens(23, 8, 50)), steps=6)


def region_losses(world, options, model=None, failing=""):
    """Train under FSDP with compiled blocks; return the losses, the notes and the compiled functions of the region."""
    functions = []
    real = torch.compile

    def observe(function, **settings):
        functions.append(function.__qualname__)
        return fail if function.__qualname__ == failing else real(function, **settings)

    def fail(*_):
        raise compile_errors()("a graph break\nand its stack")

    job = uneven_job() if model is None else sentences_job(model=model, steps=6)
    with mock.patch.object(torch, "compile", observe):
        losses, notes = losses_of(world, compile="blocks", job=job, **options)
    return losses, notes, functions


HEAD_AND_LOSS = "HeadRegion._loss_sum"


@pytest.mark.parametrize("options", [{"name": "zero2"}, {"name": "zero3"}, {"name": "zero3", "accumulation": 2}])
def test_fsdp_compiles_the_head_and_the_loss_as_one_graph(options):
    ((expected, _),) = run_ranks(functools.partial(losses_of, job=uneven_job()), 1)
    for found, notes, functions in run_ranks(region_losses, 2, options):
        assert found == pytest.approx(expected, rel=1e-9)
        assert notes == []
        assert HEAD_AND_LOSS in functions


def test_a_model_that_changes_the_logits_compiles_only_the_loss():
    job = sentences_job(model=Doubled, steps=6)
    ((expected, _),) = run_ranks(functools.partial(losses_of, job=job), 1)
    for found, notes, functions in run_ranks(region_losses, 2, {"name": "zero3"}, Doubled):
        assert found == pytest.approx(expected, rel=1e-9)
        assert notes == []
        assert HEAD_AND_LOSS not in functions


def test_a_head_that_torch_cannot_compile_with_the_loss_is_named_once():
    ((expected, _),) = run_ranks(functools.partial(losses_of, job=uneven_job()), 1)
    for found, notes, _ in run_ranks(region_losses, 2, {"name": "zero3"}, None, HEAD_AND_LOSS):
        assert found == pytest.approx(expected, rel=1e-9)
        (note,) = notes
        assert note.endswith("a graph break")


@pytest.mark.parametrize("kind", ["model", "blocks"])
def test_the_loss_is_checked_before_a_compiled_region_runs(kind):
    def mean(output, batch):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), batch[-1].flatten(), ignore_index=-100)

    def train(world):
        job = sentences_job(loss=sw.Loss(sum=mean, count="samples"))
        step = sw.build_step(job, Plan.preset("ddp", 1, batch_size=8, compile=kind), world)
        step(next(iter(step.feed)))

    with refuses("loss.sum-is-mean"):
        run_ranks(train, 1)


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_the_first_step_behind_compiled_blocks_has_no_eager_loss_of_all_rows(name):
    def train(world):
        plan = Plan.preset(name, world.size, batch_size=8, precision=FP64, compile="blocks")
        step = sw.build_step(uneven_job(), plan, world)
        with mock.patch.object(type(step), "_loss_sum", side_effect=AssertionError):
            return step(next(iter(step.feed))).loss

    losses = run_ranks(train, 2)
    assert losses[0] == losses[1]


class Biased(torch.nn.Module):
    """A decoder whose head has a bias, and whose output is an object with logits, as that of transformers."""

    def __init__(self):
        super().__init__()
        self.decoder = sw.models.decoder("gpt2-tiny", vocab_size=50, context=16)
        self.decoder.head = torch.nn.Linear(self.decoder.config.width, LARGE)

    def get_output_embeddings(self):
        return self.decoder.head

    def forward(self, *arguments):
        return {"logits": self.decoder(*arguments)}


class Scaled(Biased):
    """Reads its logits."""

    def forward(self, *arguments):
        return {"logits": super().forward(*arguments)["logits"] * 2}


class WideHead(torch.nn.Module):
    """Computes its head in the dtype of the parameters."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)

    def forward(self, tokens):
        with torch.autocast("cpu", enabled=False):
            return self.head(self.embed(tokens))


class NarrowHead(WideHead):
    """Computes its head in bf16, whatever the precision of the plan is."""

    def forward(self, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(self.embed(tokens))


class CastHead(WideHead):
    """Casts its logits, whose dtype the job's own loss may read."""

    def forward(self, tokens):
        return self.head(self.embed(tokens)).float()


def with_head(change):
    """Return a model whose head is changed by a function."""
    model = large_decoder()
    change(model.head)
    return model


def with_own_forward():
    def forward(head, hidden):
        return 3 * torch.nn.functional.linear(hidden, head.weight)

    return with_head(lambda head: setattr(head, "forward", functools.partial(forward, head)))


def with_gradient_hook():
    def clamped(_, gradients):
        return tuple(each.clamp(-1e-3, 1e-3) for each in gradients)

    return with_head(lambda head: head.register_full_backward_pre_hook(clamped))


class Capped(torch.nn.Module):
    """Caps tensors of logits, which a placeholder on the meta device is not."""

    def __init__(self):
        super().__init__()
        self.decoder = large_decoder()
        self.head = self.decoder.head

    def forward(self, tokens):
        logits = self.decoder(tokens)
        return logits if type(logits) is not torch.Tensor else 3 * torch.tanh(logits)


class Rotary(torch.nn.Module):
    """Breaks the graph before its blocks, as decoders with rotary positions do."""

    def __init__(self):
        super().__init__()
        self.decoder = sw.models.decoder("llama-tiny", vocab_size=LARGE, context=16)
        self.head = self.decoder.head

    def forward(self, tokens):
        return self.decoder(tokens)


ONE_MODEL = sw.models.decoder("gpt2-tiny", vocab_size=50, context=16)


LARGE = 4097
"""Size of a vocabulary that a compiled graph of head and loss pads, to 4160."""


def large_decoder():
    return sw.models.decoder("gpt2-tiny", vocab_size=LARGE, context=16)


def own_sum(output, batch):
    return losses.token_cross_entropy.sum_of(output, batch)


def head_losses(world, options, **changes):
    """Train sentences; return the losses, the notes and the widths of logits that are computed outside of the model."""
    widths = set()
    token_sum, sum_of = fused_loss.token_sum, fused_loss.SeparateHead.loss_sum

    def observed_sum(logits, targets):
        widths.add(logits.shape[-1])
        return token_sum(logits, targets)

    def observed(head, hidden, weight, *rest):
        widths.add(weight.shape[0])
        return sum_of(head, hidden, weight, *rest)

    with (
        mock.patch.object(fused_loss, "token_sum", observed_sum),
        mock.patch.object(fused_loss.SeparateHead, "loss_sum", observed),
    ):
        found, notes = losses_of(world, job=sentences_job(steps=3, **changes), **options)
    return found, notes, widths


WHOLE = (1, {"compile": "model"})
SHARDED = (2, {"compile": "blocks", "name": "zero3"})
OWN_LOSS = sw.Loss(sum=own_sum, count=losses.token_cross_entropy.count)
TOKEN_LOSS = losses.token_cross_entropy


@pytest.mark.parametrize(
    ("nproc", "options", "model", "loss", "widths"),
    [
        (*WHOLE, large_decoder, TOKEN_LOSS, {LARGE, 4160}),
        (*WHOLE, Rotary, TOKEN_LOSS, {LARGE, 4160}),
        (*SHARDED, Biased, TOKEN_LOSS, {LARGE, 4160}),
        (*WHOLE, Biased, OWN_LOSS, set()),
        (*WHOLE, Capped, TOKEN_LOSS, set()),
    ],
    ids=["tied", "graph-break", "output-object-fsdp", "own-loss", "changed-tensor"],
)
def test_head_and_loss_are_one_graph_if_only_the_loss_reads_the_logits_and_token_losses_pad_them(
    nproc, options, model, loss, widths
):
    ((expected, _),) = run_ranks(functools.partial(losses_of, job=sentences_job(steps=3, model=model, loss=loss)), 1)
    for found, notes, padded in run_ranks(head_losses, nproc, options, model=model, loss=loss):
        assert found == pytest.approx(expected, rel=1e-9)
        assert notes == []
        assert padded == widths


@pytest.mark.parametrize(
    ("model", "loss", "dtype", "name"),
    [
        (large_decoder, TOKEN_LOSS, torch.bfloat16, "head"),
        (large_decoder, OWN_LOSS, torch.bfloat16, "head"),
        (Biased, TOKEN_LOSS, None, "decoder.head"),
        (Biased, OWN_LOSS, None, ""),  # the loss may read more of the object than its logits
        (Scaled, TOKEN_LOSS, None, ""),
        (WideHead, TOKEN_LOSS, None, "head"),
        (WideHead, TOKEN_LOSS, torch.bfloat16, ""),  # the head computes without autocast
        (NarrowHead, TOKEN_LOSS, torch.bfloat16, "head"),
        (NarrowHead, TOKEN_LOSS, torch.float16, ""),
        (NarrowHead, TOKEN_LOSS, None, ""),
        (CastHead, TOKEN_LOSS, torch.bfloat16, "head"),  # cross entropy casts, too
        (CastHead, OWN_LOSS, torch.bfloat16, ""),
        (with_own_forward, TOKEN_LOSS, None, ""),
        (with_gradient_hook, TOKEN_LOSS, None, ""),
        (lambda: ONE_MODEL, TOKEN_LOSS, None, ""),
    ],
)
def test_a_head_is_separable_if_only_the_loss_can_see_its_logits(model, loss, dtype, name):
    batch = (torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    assert fused_loss.separable_head(sentences_job(model=model, loss=loss), lambda: batch, "cpu", dtype) == name
    assert not any(parameter.is_meta for parameter in ONE_MODEL.parameters())


def test_changed_logits_are_an_error_under_fsdp_where_a_rank_cannot_repeat_its_collectives():
    job = sentences_job(steps=1, model=Capped)
    with refuses("support.compiled-head-changed"):
        run_ranks(functools.partial(losses_of, name="zero3", compile="blocks", job=job), 2)


def test_a_target_outside_of_a_padded_vocabulary_is_refused():
    head = fused_loss.SeparateHead(torch.nn.Linear(4, LARGE), TOKEN_LOSS)
    batch = (None, torch.tensor([[0, -100, LARGE]]))
    with pytest.raises(IndexError, match="out of bounds"):
        head.loss_sum(torch.zeros(1, 3, 4), head.layer.weight, head.layer.bias, batch)


@pytest.mark.parametrize(("size", "padded"), [(4097, 4160), (4104, 4104), (257, 257), (50_257, 50_304)])
def test_only_large_vocabularies_that_are_slow_for_matrix_products_are_padded(size, padded):
    assert padded_vocabulary(size) == padded


TOKENS = 8
"""Tokens of a row of the sentences."""


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_loss_of_a_short_micro_batch_with_large_logits_is_summed_by_rows(monkeypatch, nproc):
    """Eager cross entropy of all rows makes fp32 copies of logits that the memory of a compiled plan does not have."""
    monkeypatch.setattr(step_compiled, "_CHUNK_BYTES", 1)

    def train(world, **options):
        rows = []
        step = sw.build_step(
            sentences_job(steps=6), Plan.preset("ddp", world.size, batch_size=8, precision=FP64, **options), world
        )
        cross_entropy = torch.nn.functional.cross_entropy

        def counted(logits, *given, **named):
            rows.append(len(logits))
            return cross_entropy(logits, *given, **named)

        with mock.patch.object(torch.nn.functional, "cross_entropy", counted):
            return [step(batch).loss for batch in step.feed], set(rows)

    ((expected, _),) = run_ranks(train, 1)
    for found, rows in run_ranks(functools.partial(train, compile="blocks"), nproc):
        assert found == pytest.approx(expected, rel=1e-12)
        assert rows == {TOKENS, TOKENS * 8 // nproc}  # of one row, and of a full micro-batch where it is compiled


def test_a_probe_changes_neither_buffers_nor_generators():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    with uncompiled_probe(model):
        model(torch.randn(8, 4))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("device", "is_deterministic", "options"),
    [("cuda", False, {"max_autotune_pointwise": True}), ("cuda", True, None), ("cpu", False, None)],
)
def test_the_kernels_of_a_whole_model_on_a_gpu_are_tuned_unless_they_must_be_deterministic(
    monkeypatch, device, is_deterministic, options
):
    given = []
    monkeypatch.setattr(torch, "compile", lambda _, options=None: given.append(options))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device(device))]))
    compiled_region(sentences_job(steps=1), model, Plan(compile="model"), print)
    assert given == [options]


def test_the_implementation_of_a_loss_is_found_before_its_graph_is_traced(monkeypatch):
    losses.token_sum._clear_cache()
    compiled_region(sentences_job(steps=1), torch.nn.Linear(1, 1), Plan(compile="model"), print)
    monkeypatch.setattr(functools, "_find_impl", mock.Mock(side_effect=AssertionError("searched while tracing")))
    assert losses.token_sum(torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.long)) > 0
