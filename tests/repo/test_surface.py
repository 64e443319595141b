"""The command line and the public names, frozen: a change here is a decision, not an accident."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import click

import shardwise
from shardwise.cli.main import VERBS, cli

SURFACE = {
    "data": [],
    "data prepare": [
        "INPUTS",
        "--out",
        "--tokenizer",
        "--text-field",
        "--end-token",
        "--vocab-size",
        "--processes",
        "--shard-tokens",
        "--json",
    ],
    "data inspect": [
        "PATH",
        "--tokenizer",
        "--end-id",
        "--dtype",
        "--samples",
        "--no-duplicates",
        "--verify",
        "--json",
    ],
    "data mix": [
        "SOURCES",
        "--length",
        "--batch-size",
        "--steps",
        "--tokens",
        "--packed",
        "--end-id",
        "--dtype",
        "--json",
    ],
    "plan": [
        "MODEL",
        "--cluster",
        "--batch-size",
        "--length",
        "--precision",
        "--plan",
        "--set",
        "--compile",
        "--max-memory",
        "--max-gpus",
        "--tokens",
        "--price",
        "--engine",
        "--lora",
        "--catalogue",
        "--no-history",
        "--all",
        "--calibrate",
        "--json",
        "--out",
        "--picture",
        "--report",
        "--to-deepspeed",
        "--from-deepspeed",
        "--nproc",
    ],
    "verify": [
        "JOB",
        "--plans",
        "--steps",
        "--nproc/--nproc-per-node",
        "--precision",
        "--backend",
        "--resume",
        "--shrink",
        "--set",
        "--propose-rules",
        "--json",
        "--markdown",
        "--out",
    ],
    "launch": [
        "--nproc-per-node/--nproc",
        "--max-restarts",
        "--standalone",
        "--nnodes",
        "--node-rank",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--rdzv-conf",
        "--node-timeout",
        "--master-addr",
        "--master-port",
        "--local-addr",
        "--slurm",
        "--hosts",
        "--env",
        "--kubernetes",
        "--role",
        "--monitor-interval",
        "--start-method",
        "--shutdown-timeout",
        "--preset",
        "--log-dir/--run-dir",
        "-r/--redirects",
        "-t/--tee",
        "--local-ranks-filter",
        "-m/--module",
        "--no-python",
        "--hang-after",
        "--on-hang",
        "--check-replicas",
        "--on-drift",
        "--deterministic",
        "--dry-run",
        "SCRIPT",
        "ARGUMENTS",
    ],
    "train": [
        "JOB",
        "--nproc/--nproc-per-node",
        "--plan",
        "--no-tune",
        "--set",
        "--run-dir",
        "--save-every",
        "--keep",
        "--must-save",
        "--resume",
        "--upload",
        "--max-restarts",
        "--nnodes",
        "--node-rank",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--rdzv-conf",
        "--node-timeout",
        "--master-addr",
        "--master-port",
        "--local-addr",
        "--slurm",
        "--hosts",
        "--env",
        "--kubernetes",
        "--hang-after",
        "--on-hang",
        "--check-replicas",
        "--on-drift",
        "--deterministic",
        "--preset",
        "--device",
        "--backend",
        "--sink",
        "--dry-run",
    ],
    "watch": ["RUN", "--once", "--web", "--port", "--predict", "--sink", "--compare"],
    "checkpoint": [],
    "checkpoint ls": ["PATH"],
    "checkpoint inspect": ["PATH", "--tensors"],
    "checkpoint check": ["PATH"],
    "checkpoint diff": ["LEFT", "RIGHT"],
    "checkpoint prune": ["PATH", "--keep"],
    "checkpoint convert": ["SOURCE", "TARGET", "--to", "--weights", "--step", "--config", "--zero", "--nproc"],
    "bench": [],
    "bench comm": [
        "COLLECTIVES",
        "--sizes",
        "--dtypes",
        "--ops",
        "--group",
        "--layout",
        "--root",
        "--async",
        "--seconds",
        "--nproc/--nproc-per-node",
        "--device",
        "--backend",
        "--compare",
        "--json",
        "--report",
        "--csv",
        "--explain",
    ],
    "bench p2p": [
        "--nproc/--nproc-per-node",
        "--way",
        "--size",
        "--small",
        "--together",
        "--seconds",
        "--device",
        "--backend",
        "--json",
        "--report",
    ],
    "bench overlap": [
        "JOB",
        "--plan",
        "--nproc/--nproc-per-node",
        "--buckets",
        "--prefetch",
        "--rounds",
        "--set",
        "--device",
        "--backend",
        "--json",
        "--report",
        "--out",
    ],
    "bench scaling": [
        "--ranks",
        "--nproc/--nproc-per-node",
        "--mode",
        "--rounds",
        "--plan",
        "--set",
        "--device",
        "--backend",
        "--pattern",
        "SCRIPT",
        "ARGUMENTS",
        "--json",
        "--report",
    ],
    "bench step": [
        "JOB",
        "--plan",
        "--nproc/--nproc-per-node",
        "--fake-world",
        "--rank",
        "--steps",
        "--set",
        "--device",
        "--backend",
        "--profile",
        "--trace",
        "--json",
        "--report",
    ],
    "doctor": ["--json"],
    "doctor drill": [
        "JOB",
        "ARGUMENTS",
        "--drill",
        "--nproc/--nproc-per-node",
        "--plan",
        "--set",
        "--steps",
        "--device",
        "--backend",
        "--hang-after",
        "--run-dir",
        "--script",
        "--json",
    ],
    "doctor env": ["--preset", "--nproc", "--run", "--export", "--json"],
    "doctor net": ["--hosts", "--folder", "--port", "--json"],
    "doctor run": ["PATH", "--json"],
}

PUBLIC = [
    "CallbackContext",
    "Curves",
    "EarlyStopping",
    "Job",
    "Layout",
    "Lora",
    "Loss",
    "Metric",
    "Plan",
    "STOP",
    "ShardwiseError",
    "World",
    "adamw",
    "autocast",
    "bench",
    "build_step",
    "clip_grad_norm_",
    "data_inspect",
    "data_mix",
    "data_prepare",
    "dataloader",
    "datasets",
    "doctor",
    "doctor_drill",
    "doctor_env",
    "doctor_net",
    "doctor_run",
    "evaluate",
    "export",
    "full_state_dict",
    "launch",
    "load",
    "losses",
    "metrics",
    "models",
    "muon",
    "no_sync",
    "parallelize",
    "plan",
    "save",
    "schedules",
    "sgd",
    "train",
    "unwrap",
    "verify",
    "watch",
    "world",
]


def spelling(parameter):
    return "/".join(parameter.opts) if isinstance(parameter, click.Option) else parameter.name.upper()


def test_verbs_and_their_options_are_frozen():
    context = click.Context(cli)
    found = {}
    for verb in cli.list_commands(context):
        command = cli.get_command(context, verb)
        found[verb] = [spelling(parameter) for parameter in command.params if parameter.name != "_arguments"]
        for name in command.list_commands(context) if isinstance(command, click.Group) else ():
            part = command.get_command(context, name)
            found[f"{verb} {name}"] = [spelling(parameter) for parameter in part.params]
    assert found == SURFACE


def test_public_names_are_frozen_and_all_resolve():
    assert shardwise.__all__ == PUBLIC
    assert all(getattr(shardwise, name) is not None for name in PUBLIC)


def test_help_names_every_verb_without_importing_torch():
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shardwise", "--help"], capture_output=True, text=True, check=True
    )
    assert all(verb in shown.stdout for verb in VERBS)
    imported = {line.rsplit("|", 1)[-1].strip() for line in shown.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"torch", "numpy", "rich"}


def test_import_shardwise_does_not_import_torch():
    code = "import shardwise, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_benchmarks_and_scripts_import_names_that_exist():
    """They are run by hand, so that a renamed function would go unnoticed."""
    root = Path(__file__).resolve().parents[2]
    missing = []
    for path in [*root.glob("benchmarks/*.py"), *root.glob("scripts/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardwise":
                module = importlib.import_module(node.module)
                missing += [
                    f"{path.name}: {node.module}.{name.name}" for name in node.names if not has(module, name.name)
                ]
    assert missing == []


def has(module, name):
    try:
        return hasattr(module, name) or bool(importlib.import_module(f"{module.__name__}.{name}"))
    except ImportError:
        return False
