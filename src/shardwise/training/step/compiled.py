"""The compiled region of a step: forward and loss in one graph, or what follows compiled blocks: head and loss.

An eager loss reads and writes the logits in fp32 several times. In one graph inductor fuses the casts, the softmax and
the gradient of the logits: GPT-2 124M trains 1.7 times as fast as with compiled blocks on an H200. Hooks of DDP, FSDP
and tensor parallelism must stay outside a graph, so only the loss is compiled there, under FSDP with the output head.

If only the loss reads the logits, forward returns the input of the head, and the graph of the loss computes the logits.
Then their gradient overwrites them, also if a graph break within the model separates it from the loss, and the graph
may pad the vocabulary. The invariant: the region computes `Loss.sum_of(forward(model, batch), batch)`.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.data.rows import map_rows, map_tensors, tensors
from shardwise.errors import JobError
from shardwise.job.losses import find_implementations
from shardwise.parallel.fused_loss import LogitsChangedError, SeparateHead
from shardwise.parallel.recompute import find_blocks
from shardwise.plans.rules import compiles_head
from shardwise.torch_private.dynamo import (
    compile_errors,
    graph_breaks,
    has_compiler,
    num_compiled,
    recompile_reasons,
)
from shardwise.training.step.step import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from traceback import FrameSummary

    from shardwise.data.rows import RowMarks
    from shardwise.dist import World
    from shardwise.job import Job, Loss
    from shardwise.plans import Plan


def compilable(plan: Plan, world: World, note: Callable[[str], None]) -> Plan:
    """Return the plan, eager if a rank has no compiler. Communicates over the world if the plan compiles.

    Ranks must agree, since FSDP2 keeps other parameters gathered for a compiled head.
    """
    if plan.compile == "none":
        return plan
    found = [has_compiler(world.device.type)]
    if world.size > 1 and world.backend != "fake":
        found = world.gather(found[0])
    if all(found):
        return plan
    note(
        f"compile = {plan.compile}: the model runs eagerly, because torch.compile finds no C++ compiler: install g++,"
        " or set CXX to a compiler"
    )
    return dataclasses.replace(plan, compile="none")


def compiled_region(
    job: Job, model: nn.Module, plan: Plan, note: Callable[[str], None], *, head: str = ""
) -> CompiledRegion | HeadRegion | None:
    """Return the compiled region of a plan without pipeline stages; None if nothing or only blocks are compiled.

    `note` receives the reason if torch cannot compile the region. `head` is the name of a `separable_head`.
    """
    if plan.compile == "none" or plan.fused_loss or job.masks == "keyed":
        return None  # a fused loss computes logits chunk by chunk in kernels of its own
    layer = model.get_submodule(head) if head else None
    separate = SeparateHead(layer, job.loss) if type(layer) is nn.Linear else None  # None for a layer in float8
    if separate is not None and compiles_head(plan):
        return HeadRegion(job, model, separate, note)
    is_whole = plan.layout.world_size == 1 and (plan.compile == "model" or not find_blocks(model))
    if not is_whole:
        return CompiledRegion(job, note, kind=plan.compile, is_whole=False)
    return CompiledRegion(job, note, kind=plan.compile, is_whole=True, options=_tuned(model), head=separate)


def _tuned(model: nn.Module) -> dict[str, Any] | None:
    """Return the options with which inductor measures several tile sizes of each kernel except matrix products.

    A step of a 1.2-billion-parameter Llama shape on an H200 takes 0.5 % less time. Ranks could choose different sizes,
    whose sums round differently, so this is for one rank only.
    """
    if next(model.parameters()).device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return None
    return {"max_autotune_pointwise": True}


_CHUNK_BYTES = 2**26
"""Logits of a short micro-batch, in the compute dtype, of which an eager loss may make fp32 copies at a time."""


class _SumByRows(torch.autograd.Function):
    """Sums a loss over chunks of rows and computes their gradients in forward, so that fp32 copies are of one chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, chunk: int, loss_of: Callable[[Tensor, slice], Tensor]) -> Tensor:
        gradient = torch.empty_like(logits)
        total = logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
        for first in range(0, len(logits), chunk):
            rows = slice(first, first + chunk)
            part = logits[rows].detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_of(part, rows)
            gradient[rows] = torch.autograd.grad(loss, part)[0]
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *weights: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(weights[0]), None, None


def sum_by_rows(loss: Loss, output: Any, batch: Any, marks: RowMarks) -> Tensor | None:
    """Return the loss sum of a short micro-batch by chunks of rows; None if its logits are small or not the one output.

    The last micro-batch of an epoch may have any number of rows, so it is not compiled. An eager loss of all its rows
    would need several fp32 copies of the logits, which the compiled loss of full micro-batches does not need.
    `marks` are those of the tensors in `batch` that have rows. None also in fp16: its gradients need the loss scale,
    which is applied in backward.
    """
    found = tensors(output)
    if len(found) != 1 or type(found[0]) is not Tensor or not found[0].requires_grad:
        return None
    whole = found[0]
    if whole.nbytes <= _CHUNK_BYTES or whole.dtype == torch.float16:
        return None

    def loss_of(logits: Tensor, rows: slice) -> Tensor:
        of_rows = map_rows(lambda tensor: tensor[rows], batch, marks)
        summed: Tensor = loss.sum_of(map_tensors(lambda _: logits, output), of_rows)
        return summed

    chunk = max(1, _CHUNK_BYTES // (whole.nbytes // len(whole)))
    total: Tensor = _SumByRows.apply(whole, chunk, loss_of)  # type: ignore[no-untyped-call]
    return total


class CompiledRegion:
    """Computes the loss sum of a full micro-batch in one compiled graph, or eagerly if torch cannot compile it."""

    def __init__(
        self,
        job: Job,
        note: Callable[[str], None],
        *,
        kind: str,
        is_whole: bool,
        options: dict[str, Any] | None = None,
        head: SeparateHead | None = None,
    ) -> None:
        """Create the region of `compile = kind`; `is_whole` includes the forward pass, else only the loss.

        `options` are those of inductor, and `head` is that of a whole region, if it is separable.
        """
        self._job = job
        self._note = note
        self._kind = kind
        self.is_whole = is_whole
        self._head = head
        find_implementations(Tensor)
        function = self._loss_sum if is_whole else job.loss.sum_of
        self._compiled: Callable[..., Tensor] | None = torch.compile(function, options=options)

    @property
    def is_compiled(self) -> bool:
        """Whether torch has not failed to compile it."""
        return self._compiled is not None

    def __call__(self, model: nn.Module, batch: Any, whole_batch: Any) -> Tensor:
        """Return the loss sum of `batch`; under context parallelism, `whole_batch` has all tokens of its rows."""
        if not self.is_whole:
            return self.checked(model, batch, whole_batch, lambda _: None)
        return self._run(model, batch, self._loss_batch(batch, whole_batch))

    def checked(self, model: nn.Module, batch: Any, whole_batch: Any, check: Callable[[Any], None]) -> Tensor:
        """Return the same for a region without the forward pass, whose output is passed to `check` before the loss."""
        output = self._job.forward(model, batch)
        check(output)
        return self._run(output, self._loss_batch(batch, whole_batch))

    def _loss_batch(self, batch: Any, whole_batch: Any) -> Any:
        return batch if self._job.loss.by_row else whole_batch

    def _run(self, *arguments: Any) -> Tensor:
        while self._compiled is not None:
            try:
                with NOTHING if self._head is None else self._head.skipped():
                    return self._compiled(*arguments)
            except LogitsChangedError:
                self._head = None  # this forward pass is repeated with the head in the model
            except compile_errors() as error:
                self._compiled = self._head = None
                reason = str(error).strip().splitlines()[0]
                what = "the model and its loss run" if self.is_whole else "the loss runs"
                self._note(f"compile = {self._kind}: {what} eagerly, because torch.compile failed: {reason}")
        if not self.is_whole:
            return self._job.loss.sum_of(*arguments)  # type: ignore[no-any-return]
        with torch.compiler.set_stance("force_eager"):  # the model that the region contains fails to compile as well
            return self._loss_sum(*arguments)

    def _loss_sum(self, model: nn.Module, batch: Any, loss_batch: Any) -> Tensor:
        output = self._job.forward(model, batch)
        if self._head is None:
            return self._job.loss.sum_of(output, loss_batch)  # type: ignore[no-any-return]
        layer = self._head.layer
        return self._head.loss_sum(self._head.input_of(output), layer.weight, layer.bias, loss_batch)


# The output head and the loss in one graph under FSDP.
#
# The head belongs to FSDP2's root unit, whose hooks surround the forward pass of the model. In this region, forward
# returns the input of the head, and the graph gets the gathered weight as an argument. The invariant: every forward
# pass in training leaves the root unit gathered until backward. A rank with a short micro-batch runs forward without
# this region, and would otherwise gather the root once more than other ranks.


class HeadRegion:
    """Computes output head and loss sum of a full micro-batch in one compiled graph, behind compiled FSDP2 blocks.

    If torch cannot compile them without a graph break, only the loss is compiled.
    """

    is_whole = False

    def __init__(self, job: Job, model: Any, head: SeparateHead, note: Callable[[str], None]) -> None:
        """Create the region of the head of `model`, an FSDP2 root; call on every rank."""
        self._job = job
        self._head = head
        self._note = note
        model.set_reshard_after_forward(False, recurse=False)
        self._loss_region = CompiledRegion(job, note, kind="blocks", is_whole=False)
        self._compiled: Callable[..., Tensor] | None = torch.compile(self._loss_sum, fullgraph=True)

    @property
    def is_compiled(self) -> bool:
        """Whether torch has not failed to compile the loss, at least without the head."""
        return self._loss_region.is_compiled

    def __call__(self, model: Any, batch: Any, whole_batch: Any) -> Tensor:
        """Return the loss sum of `batch`; `whole_batch` is the same without context parallelism."""
        if self._compiled is None:
            return self._loss_region(model, batch, whole_batch)
        layer = self._head.layer
        with self._head.skipped():
            output = self._job.forward(model, batch)
        try:
            arguments = (self._head.input_of(output), layer.weight, layer.bias, batch)
        except LogitsChangedError:
            raise JobError(
                "the model changes the logits of its output head in some forward passes only, which compile = blocks"
                " does not support with zero = 2 and 3",
                code="support.compiled-head-changed",
                fix="pass --set compile=none, or change the logits in Job.loss",
            ) from None
        try:
            return self._compiled(*arguments)
        except compile_errors() as error:
            self._compiled = None
            reason = str(error).strip().splitlines()[0]
            self._note(f"compile = blocks: the loss is compiled without the output head, because {reason}")
            return self._loss_sum(*arguments)

    def checked(self, model: Any, batch: Any, whole_batch: Any, check: Callable[[Any], None]) -> Tensor:
        """Return the same with only the loss compiled; `check` receives the output, which has the logits."""
        return self._loss_region.checked(model, batch, whole_batch, check)

    def _loss_sum(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, batch: Any) -> Tensor:
        return self._head.loss_sum(hidden, weight, bias, batch)


@contextmanager
def uncompiled_probe(model: nn.Module) -> Iterator[None]:
    """Run a forward pass in this context eagerly and without gradients, and restore buffers and generators after it."""
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield
        for buffer, value in buffers:
            buffer.copy_(value)


# What a user cannot see in a compiled step: breaks of the graph, and graphs for other shapes.


class CompileWatch:
    """Reports, once each, why torch.compile breaks the graph of a step and why it compiles for another shape."""

    def __init__(self, kind: str, note: Callable[[str], None]) -> None:
        """Watch the steps of a plan with `compile = kind`."""
        self._kind, self._note = kind, note
        self._known = num_compiled()
        self._has_break = self._has_shapes = False
        self._began_s = 0.0

    def begin(self) -> None:
        """Start a step."""
        self._began_s = time.time()

    def end(self, number: int) -> None:
        """Report what torch compiled in step `number`; without a new graph, this takes a microsecond."""
        found = num_compiled()
        if found == self._known:
            return
        (_, num_breaks), self._known = self._known, found
        if not self._has_break:
            self._report_break(num_breaks)
        if not self._has_shapes:
            self._report_shapes(number)

    def _report_break(self, num_known: int) -> None:
        for reason, frames in graph_breaks()[num_known:]:
            line = _user_line(frames)
            if line:
                self._has_break = True
                self._note(
                    f"compile = {self._kind}: torch.compile breaks the graph at {line} ({reason.splitlines()[0]}); the"
                    " code before and after it is compiled separately, and it runs in Python in every step: move it out"
                    " of forward"
                )
                return

    def _report_shapes(self, number: int) -> None:
        for reason in recompile_reasons(self._began_s):
            text = reason.splitlines()[0].partition("  #")[0].partition(": ")[2].strip()
            if "size mismatch" in text or ".size()[" in text:
                self._has_shapes = True
                self._note(
                    f"compile = {self._kind}: torch.compile compiled another graph in step {number}, because shapes"
                    f" change ({text}); this takes compile time, and kernels for any shape are slower: pad batches to a"
                    " fixed length in Job.collate"
                )
                return


_TORCH = Path(torch.__file__).parent
_STANDARD_LIBRARY = str(Path(dataclasses.__file__).parent)
_OWN = str(Path(__file__).parents[2])
_EXPECTED = (_OWN, str(_TORCH / "distributed"), str(_TORCH / "nn" / "modules" / "module.py"))
"""Code that breaks graphs by design: hooks of FSDP2 and tensor parallelism, and models of this package."""


def _user_line(frames: Sequence[FrameSummary]) -> str:
    """Return the last file and line of the user's code in a stack; "" if the graph break is expected."""
    if not frames or frames[-1].filename.startswith(_EXPECTED):
        return ""
    outside = [frame for frame in frames if _is_of_user(frame.filename)]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else ""


def _is_of_user(filename: str) -> bool:
    """Whether a file belongs to the user or to a package that the user has installed."""
    if filename.startswith((_OWN, str(_TORCH))):
        return False
    return "-packages" in filename or not filename.startswith(_STANDARD_LIBRARY)
