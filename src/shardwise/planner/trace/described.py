"""Descriptions of models, kept by content: the same model, samples and torch are traced once."""

from __future__ import annotations

import hashlib
import inspect
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.planner.model.forms import Model
from shardwise.planner.trace.allowed import CP_DEGREES, context_degrees
from shardwise.planner.trace.rehearsal import Subject
from shardwise.planner.trace.trace import describe
from shardwise.versions import package_version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardwise.job import Job
    from shardwise.plans.plan import DType

VERSION = 5
"""Of how a description is made; another one is traced anew. Functions that a module calls are not looked at."""
_BASES = {object, nn.Module}


def described(job: Job, compute: DType, folder: Path) -> Model:
    """Return the description of a job's model from `folder`, or trace it and leave it there."""
    path = folder / f"{fingerprint(job, compute)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Model)
    except (OSError, msgspec.DecodeError):
        pass  # never traced, or written by another version
    model = describe(job, compute)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(model))
    except OSError:
        pass  # a read-only home costs the trace again, not the plan
    return model


def fingerprint(job: Job, compute: DType) -> str:
    """Return a name for all that a description depends on: modules, their code, samples, loss, and torch."""
    subject = Subject.of(job, compute, gathered=False)
    versions = (VERSION, package_version("shardwise"), torch.__version__)
    digest = hashlib.sha256(f"{versions} {compute} {job.tensor_rules}".encode())
    for line in _lines(subject.model):
        digest.update(line.encode())
    for leaf in tree_leaves(subject.batch(1)):
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode() if isinstance(leaf, Tensor) else repr(leaf).encode())
    for function in (job.loss.sum, job.forward):
        digest.update(_source(function).encode())
    # Whether sequences can be cut is a matter of what samples hold, too: a padded mask cannot.
    digest.update(repr(context_degrees(subject, max(CP_DEGREES))).encode())
    return digest.hexdigest()[:32]


def _lines(model: nn.Module) -> Iterator[str]:
    seen: set[type] = set()
    for name, module in model.named_modules():
        yield f"{name} {module.extra_repr()} {getattr(module, 'config', '')}"
        if type(module) not in seen:
            seen.add(type(module))
            yield from (_source(kind) for kind in type(module).__mro__ if kind not in _BASES)
    for name, value in model.named_parameters():
        yield f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad}"


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return repr(type(thing))
