"""Start the recorder of a rank, which patches torch when the script imports it, and record fingerprints of replicas."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import signal
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.engines import RECORDED_MODULES
from shardwise.environment import adopt, identify, variables
from shardwise.recorder.imports import be_deterministic, take_options, when_imported
from shardwise.recorder.torch_calls import record_batches, record_collectives, record_functional
from shardwise.runs import EventLog, RunDirectory
from shardwise.runs.calls import ENOUGH_SEPARATE_STEPS, CallRing
from shardwise.runs.directory import use_listener_folder
from shardwise.torch_private.distributed import FUNCTIONAL_COLLECTIVES, has_rpc_agent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.optim import Optimizer


_C10D = "torch.distributed.distributed_c10d"
STACKS_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else 0
"""Signal on which a rank dumps the stacks of its threads; a real-time signal, since scripts use the named signals."""


def start_record(run: RunDirectory, rank: int, world_size: int) -> None:
    """Start recording this rank in `run`, and apply the options that the launcher passed.

    If files cannot be mapped or the disk is full, the rank runs without a record.
    """
    options = take_options()
    if options.deterministic:
        be_deterministic(seed=rank)
    if options.check_replicas:
        record_replicas(run.replicas(rank), options.check_replicas)
    try:
        number = _register_stacks(run, rank)
        ring = CallRing(run.calls(rank), stacks_signal=number)
    except OSError:
        return
    os.register_at_fork(after_in_child=ring.detach)

    when_imported(
        {
            _C10D: lambda: _record(ring, world_size),
            "torch.utils.data.dataloader": lambda: record_batches(ring),
            "torch.optim.optimizer": lambda: record_separate_steps(ring, world_size),
            **{name: partial(_record_engine, name, ring, world_size) for name in RECORDED_MODULES},
        }
    )


def _record_engine(module: str, ring: CallRing, world_size: int) -> None:
    sys.modules[module].record(ring, world_size)


def _record(ring: CallRing, world_size: int) -> None:
    recorder = record_collectives(ring, world_size)
    when_imported({FUNCTIONAL_COLLECTIVES: lambda: record_functional(recorder, sys.modules[FUNCTIONAL_COLLECTIVES])})


def _register_stacks(run: RunDirectory, rank: int) -> int:
    """Dump all stacks to a file on STACKS_SIGNAL, even while C code holds the GIL; return the signal's number.

    Fatal signals, such as SIGABRT from gloo, dump the stacks too, unless faulthandler was enabled before.
    """
    if not STACKS_SIGNAL:
        return 0
    path = run.stack_samples(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    if not faulthandler.is_enabled():
        faulthandler.enable(file=file, all_threads=True)
    with contextlib.suppress(RuntimeError, ValueError):  # a platform without this signal records no stacks
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        return int(STACKS_SIGNAL)
    return 0


# Starting the recorder in a new interpreter: Python imports `sitecustomize` before the script.


_RUN = "SHARDWISE_RECORD"
_LISTENERS = "SHARDWISE_LISTENERS"
_PATH = "PYTHONPATH"
_FOLDER = str(Path(__file__).with_name("site"))


def record_variables(environ: Mapping[str, str], run: Path) -> dict[str, str]:
    """Return the environment variables that make a new interpreter record in `run`; the interpreter unsets them."""
    path = environ.get(_PATH)
    return {_RUN: str(run), _PATH: f"{_FOLDER}{os.pathsep}{path}" if path else _FOLDER}


def listener_variables(folder: str) -> dict[str, str]:
    """Return the environment variables that make a recorded interpreter put multiprocessing's sockets in `folder`."""
    return {_LISTENERS: folder}


def start_here() -> None:
    """Start the recorder that the environment requests, restore the environment, and run the user's sitecustomize."""
    environ = variables("")
    run, listeners = environ.pop(_RUN, ""), environ.pop(_LISTENERS, "")
    others = [entry for entry in environ.pop(_PATH, "").split(os.pathsep) if entry and entry != _FOLDER]
    if others:
        environ[_PATH] = os.pathsep.join(others)
    adopt(environ)
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    if run:
        me = identify()
        start_record(RunDirectory(Path(run)), me.rank, me.world_size)
    if listeners:
        use_listener_folder(listeners)
    del sys.modules["sitecustomize"]
    importlib.invalidate_caches()
    # Without a sitecustomize of the user, this must raise ModuleNotFoundError: Python then assumes that there is none,
    # but reports an import that succeeded without its module as an error.
    importlib.import_module("sitecustomize")


# Fingerprints of DDP's replicated parameters at optimizer steps.


_DDP = "torch.nn.parallel.distributed"
_OPTIMIZER = "torch.optim.optimizer"


def record_replicas(path: Path, every: int) -> None:
    """Append fingerprints of replicated parameters to `path` at the first and every `every`-th optimizer step.

    Does not communicate. The launcher compares the events `tensors` (names, groups of ranks) and `check` of all ranks.
    """
    watch = _OptimizerWatch(path, every)
    when_imported({_DDP: watch.attach_to_ddp, _OPTIMIZER: watch.attach_to_optimizers})


class _OptimizerWatch:
    """Hooks of one process on the construction of DDP models and on optimizer steps."""

    def __init__(self, path: Path, every: int) -> None:
        self._path, self._every = path, every
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._before: dict[int, dict[str, Any]] = {}
        self._log: EventLog | None = None

    def attach_to_ddp(self) -> None:
        """Register every DDP model when it is constructed."""
        ddp = sys.modules[_DDP].DistributedDataParallel
        real = ddp.__init__

        @functools.wraps(real)
        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            real(model, *args, **kwargs)
            self._models.add(model)

        ddp.__init__ = init

    def attach_to_optimizers(self) -> None:
        """Register hooks before and after every optimizer step."""
        module = sys.modules[_OPTIMIZER]
        module.register_optimizer_step_pre_hook(self._before_step)
        module.register_optimizer_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
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

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
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
        """Return the optimizer's parameters that DDP replicates, with their name and the ranks that replicate them."""
        from torch.distributed import get_process_group_ranks

        known: dict[int, tuple[str, tuple[int, ...]]] = {}
        for model in self._models:
            ranks = tuple(get_process_group_ranks(model.process_group))
            for name, parameter in model.module.named_parameters():
                if name not in model.parameters_to_ignore:
                    known[id(parameter)] = name, ranks
        replicated = []
        for group in optimizer.param_groups:
            parameters = [parameter for parameter in group["params"] if id(parameter) in known]
            replicated += [(known[id(parameter)], parameter) for parameter in parameters]
        return replicated


# Detection of a rank that runs optimizer steps without a process group, so that it does not synchronize gradients.


OTHER_TRANSPORTS = (
    *("mpi4py", "horovod", "byteps", "bagua", "hivemind", "oneccl_bindings_for_pytorch"),
    *("jax", "mlx.core", "tensorflow", "ray", "dask", "cupy", "zmq"),
)
"""Modules through which ranks may synchronize gradients or weights without a process group of torch."""


def record_separate_steps(ring: CallRing, world_size: int) -> None:
    """Record how many of its first optimizer steps this rank runs without a process group or another transport."""
    if world_size == 1:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def count(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        import torch  # here: the optimizer module is imported while torch itself is being imported

        nonlocal steps
        # The hook stays registered, since removing it would make torch.compile trace a compiled step again.
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
    """Whether this rank can synchronize gradients or weights with other ranks, through torch or another library."""
    import torch.distributed as dist

    if any(name in sys.modules for name in OTHER_TRANSPORTS):
        return True
    if not dist.is_available():
        return False
    return dist.is_initialized() or has_rpc_agent()
