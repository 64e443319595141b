"""Fingerprints of what DDP keeps equal around optimizer steps, and ranks that train without a process group."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from shardwise.recorder.imports import when_imported
from shardwise.runs import EventLog
from shardwise.runs.calls import ENOUGH_SEPARATE_STEPS
from shardwise.torch_private.distributed import has_rpc_agent

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardwise.runs.calls import CallRing


_DDP = "torch.nn.parallel.distributed"
_OPTIMIZER = "torch.optim.optimizer"


def record_replicas(path: Path, every: int) -> None:
    """Append fingerprints to `path` at the first and every so many optimizer steps; no communication.

    Events `tensors` (names and groups of ranks) and `check` of each optimizer, which the launcher compares.
    """
    watch = _OptimizerWatch(path, every)
    when_imported({_DDP: watch.attach_to_ddp, _OPTIMIZER: watch.attach_to_optimizers})


class _OptimizerWatch:
    """Hooks of one process: DDP models as they are made, optimizers as they step."""

    def __init__(self, path: Path, every: int) -> None:
        self._path, self._every = path, every
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._before: dict[int, dict[str, Any]] = {}
        self._log: EventLog | None = None

    def attach_to_ddp(self) -> None:
        """Hear of every DDP model."""
        kind = sys.modules[_DDP].DistributedDataParallel
        real = kind.__init__

        @functools.wraps(real)
        def made(model: Any, *args: Any, **kwargs: Any) -> None:
            real(model, *args, **kwargs)
            self._models.add(model)

        kind.__init__ = made

    def attach_to_optimizers(self) -> None:
        """Look before and after every optimizer step."""
        module = sys.modules[_OPTIMIZER]
        module.register_optimizer_step_pre_hook(self._look_before)
        module.register_optimizer_step_post_hook(self._look_after)

    def _look_before(self, optimizer: Optimizer, *_: Any) -> None:
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if step > 1 and step % self._every:
            return
        replicated = self._replicated(optimizer)
        if replicated:
            from shardwise.recorder.fingerprint import combined, fingerprints, settings_print

            values = fingerprints([parameter.detach() for _, parameter in replicated])
            gradients = [parameter.grad for _, parameter in replicated if parameter.grad is not None]
            self._before[id(optimizer)] = {
                "before": values if step == 1 else combined(values),
                "gradients": combined(fingerprints(gradients)),
                "settings": settings_print(optimizer.param_groups),
            }

    def _look_after(self, optimizer: Optimizer, *_: Any) -> None:
        before = self._before.pop(id(optimizer), None)
        if before is None:
            return
        from shardwise.recorder.fingerprint import fingerprints

        replicated = self._replicated(optimizer)
        log = self._log = self._log or EventLog(self._path)
        if optimizer not in self._numbers:
            number = self._numbers[optimizer] = len(self._numbers)
            groups = list(dict.fromkeys(ranks for (_, ranks), _ in replicated))
            tensors = [(name, groups.index(ranks)) for (name, ranks), _ in replicated]
            log.write("tensors", optimizer=number, tensors=tensors, groups=groups)
        after = fingerprints([parameter.detach() for _, parameter in replicated])
        log.write("check", optimizer=self._numbers[optimizer], step=self._steps[optimizer], after=after, **before)

    def _replicated(self, optimizer: Optimizer) -> list[tuple[tuple[str, tuple[int, ...]], nn.Parameter]]:
        """Return what of an optimizer's parameters DDP keeps equal, with its name and the ranks that have it."""
        from torch.distributed import get_process_group_ranks

        known: dict[int, tuple[str, tuple[int, ...]]] = {}
        for model in self._models:
            ranks = tuple(get_process_group_ranks(model.process_group))
            for name, parameter in model.module.named_parameters():
                if name not in model.parameters_to_ignore:
                    known[id(parameter)] = name, ranks
        everything: list[Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        return [(known[id(each)], each) for each in everything if id(each) in known]  # type: ignore[misc]


# Noticing a rank that trains without a process group: it makes optimizer steps, and communicates with nobody.


OTHER_TRANSPORTS = (
    *("mpi4py", "horovod", "byteps", "bagua", "hivemind", "oneccl_bindings_for_pytorch"),
    *("jax", "mlx.core", "tensorflow", "ray", "dask", "cupy", "zmq"),
)
"""Modules through which ranks may synchronize gradients or weights where no process group of torch sees it."""


def record_separate_steps(ring: CallRing, world_size: int) -> None:
    """Count the first optimizer steps of this rank for as long as it communicates with nobody."""
    if world_size == 1:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def count(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        import torch  # here: the module of optimizers is imported while torch itself still is

        nonlocal steps
        # A hook stays registered: to remove it would have torch.compile trace a compiled step again.
        if torch.compiler.is_compiling() or steps == ENOUGH_SEPARATE_STEPS:
            return
        if _communicates():
            steps = ENOUGH_SEPARATE_STEPS  # nothing more to count
            ring.set_separate_steps(0)
        else:
            steps += 1
            ring.set_separate_steps(steps)

    register_optimizer_step_post_hook(count)


def _communicates() -> bool:
    """Whether this rank has, or may have, a way to synchronize what it trains with other ranks."""
    import torch.distributed as dist

    if any(name in sys.modules for name in OTHER_TRANSPORTS):
        return True
    if not dist.is_available():
        return False
    return dist.is_initialized() or has_rpc_agent()
