"""Distributed training of PyTorch jobs, from one process to a cluster, verified against training in one process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise import models as models
    from shardwise.data import datasets as datasets
    from shardwise.data.inspect import data_inspect as data_inspect
    from shardwise.data.mix import data_mix as data_mix
    from shardwise.data.prepare.prepare import data_prepare as data_prepare
    from shardwise.diagnosis.drill.drill import doctor_drill as doctor_drill
    from shardwise.diagnosis.env import doctor_env as doctor_env
    from shardwise.diagnosis.machine.observe import doctor as doctor
    from shardwise.diagnosis.network.net import doctor_net as doctor_net
    from shardwise.diagnosis.run.explain import doctor_run as doctor_run
    from shardwise.dist import World as World
    from shardwise.dist import world as world
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.job import Job as Job
    from shardwise.job import Lora as Lora
    from shardwise.job import Loss as Loss
    from shardwise.job import Metric as Metric
    from shardwise.job import losses as losses
    from shardwise.job import metrics as metrics
    from shardwise.job import schedules as schedules
    from shardwise.job.callbacks import STOP as STOP
    from shardwise.job.callbacks import EarlyStopping as EarlyStopping
    from shardwise.job.optimizers import SGD as sgd  # noqa: F401, N811 - lower case as sw.adamw
    from shardwise.job.optimizers import AdamW as adamw  # noqa: F401, N813 - called like a function
    from shardwise.job.optimizers import Muon as muon  # noqa: F401, N813
    from shardwise.layout import Layout as Layout
    from shardwise.measurement.specs import bench as bench
    from shardwise.monitor.watch import watch as watch
    from shardwise.parallel.collectives import full_state_dict as full_state_dict
    from shardwise.parallel.collectives import unwrap as unwrap
    from shardwise.parity.verify import verify as verify
    from shardwise.planner.plan import plan as plan
    from shardwise.plans import Plan as Plan
    from shardwise.runner.launch import launch as launch
    from shardwise.runner.train import train as train
    from shardwise.training.build import build_step as build_step
    from shardwise.training.callbacks import CallbackContext as CallbackContext
    from shardwise.training.evaluate import evaluate as evaluate
    from shardwise.training.evaluate import export as export
    from shardwise.training.journal import Curves as Curves
    from shardwise.training.own_loop import autocast as autocast
    from shardwise.training.own_loop import clip_grad_norm_ as clip_grad_norm_
    from shardwise.training.own_loop import dataloader as dataloader
    from shardwise.training.own_loop import no_sync as no_sync
    from shardwise.training.own_loop import parallelize as parallelize
    from shardwise.training.own_state import load as load
    from shardwise.training.own_state import save as save

_PUBLIC = {
    "CallbackContext": ("shardwise.training.callbacks", "CallbackContext"),
    "Curves": ("shardwise.training.journal", "Curves"),
    "EarlyStopping": ("shardwise.job.callbacks", "EarlyStopping"),
    "Job": ("shardwise.job", "Job"),
    "Layout": ("shardwise.layout", "Layout"),
    "Lora": ("shardwise.job", "Lora"),
    "Loss": ("shardwise.job", "Loss"),
    "Metric": ("shardwise.job", "Metric"),
    "Plan": ("shardwise.plans", "Plan"),
    "STOP": ("shardwise.job.callbacks", "STOP"),
    "ShardwiseError": ("shardwise.errors", "ShardwiseError"),
    "World": ("shardwise.dist", "World"),
    "adamw": ("shardwise.job.optimizers", "AdamW"),
    "bench": ("shardwise.measurement.specs", "bench"),
    "autocast": ("shardwise.training.own_loop", "autocast"),
    "build_step": ("shardwise.training.build", "build_step"),
    "clip_grad_norm_": ("shardwise.training.own_loop", "clip_grad_norm_"),
    "data_inspect": ("shardwise.data.inspect", "data_inspect"),
    "data_mix": ("shardwise.data.mix", "data_mix"),
    "data_prepare": ("shardwise.data.prepare.prepare", "data_prepare"),
    "dataloader": ("shardwise.training.own_loop", "dataloader"),
    "datasets": ("shardwise.data.datasets", ""),
    "doctor": ("shardwise.diagnosis.machine.observe", "doctor"),
    "doctor_drill": ("shardwise.diagnosis.drill.drill", "doctor_drill"),
    "doctor_env": ("shardwise.diagnosis.env", "doctor_env"),
    "doctor_net": ("shardwise.diagnosis.network.net", "doctor_net"),
    "doctor_run": ("shardwise.diagnosis.run.explain", "doctor_run"),
    "evaluate": ("shardwise.training.evaluate", "evaluate"),
    "export": ("shardwise.training.evaluate", "export"),
    "full_state_dict": ("shardwise.parallel.collectives", "full_state_dict"),
    "launch": ("shardwise.runner.launch", "launch"),
    "load": ("shardwise.training.own_state", "load"),
    "losses": ("shardwise.job.losses", ""),
    "metrics": ("shardwise.job.metrics", ""),
    "models": ("shardwise.models", ""),
    "muon": ("shardwise.job.optimizers", "Muon"),
    "no_sync": ("shardwise.training.own_loop", "no_sync"),
    "parallelize": ("shardwise.training.own_loop", "parallelize"),
    "plan": ("shardwise.planner.plan", "plan"),
    "save": ("shardwise.training.own_state", "save"),
    "schedules": ("shardwise.job.schedules", ""),
    "sgd": ("shardwise.job.optimizers", "SGD"),
    "train": ("shardwise.runner.train", "train"),
    "verify": ("shardwise.parity.verify", "verify"),
    "watch": ("shardwise.monitor.watch", "watch"),
    "unwrap": ("shardwise.parallel.collectives", "unwrap"),
    "world": ("shardwise.dist", "world"),
}
"""Public name -> module and attribute ("" for the module itself). They are imported on first use, so that
`import shardwise` takes milliseconds and does not import torch."""

__all__ = sorted(_PUBLIC)  # noqa: PLE0605 - a list of str


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}", name=name)
    module_name, attribute = _PUBLIC[name]
    module = importlib.import_module(module_name)
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return __all__
