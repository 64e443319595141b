"""The command line and the public names, frozen: a change here is a decision, not an accident."""

import subprocess
import sys

import click

import shardwise
from shardwise.cli.main import VERBS, cli

SURFACE = {
    "plan": [
        "MODEL",
        "--cluster",
        "--batch-size",
        "--length",
        "--precision",
        "--engine",
        "--lora",
        "--catalogue",
        "--no-history",
        "--all",
        "--calibrate",
        "--json",
        "--out",
        "--picture",
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


def words(parameter):
    return "/".join(parameter.opts) if isinstance(parameter, click.Option) else parameter.name.upper()


def test_verbs_and_their_options_are_frozen():
    context = click.Context(cli)
    found = {}
    for verb in cli.list_commands(context):
        command = cli.get_command(context, verb)
        found[verb] = [words(parameter) for parameter in command.params if parameter.name != "_arguments"]
        for name in command.list_commands(context) if isinstance(command, click.Group) else ():
            part = command.get_command(context, name)
            found[f"{verb} {name}"] = [words(parameter) for parameter in part.params]
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
