"""Plan files of version 1: presets and products as the first edition wrote them, and one that sets every key."""

import shardwise as sw
from goldens.entry import plan_to_toml
from goldens.store import DATA

FOLDER = DATA / "plans"
PRESETS = {
    "ddp": (2, 16),
    "zero1": (4, 16),
    "zero2": (4, 16),
    "zero3": (8, 64),
    "fsdp": (8, 64),
    "hsdp": (8, 64),
    "tp": (2, 16),
    "pp": (4, 32),
    "cp": (2, 16),
    "pp2.shard2.tp2": (8, 64),
    "replicate2.shard2.cp2": (8, 64),
    "pp2.replicate2": (4, 32),
}
"""Preset or product: ranks and global batch."""
EVERY_KEY = "every_key"
"""The file in which every key but the version differs from its default."""


def preset(name):
    """Return the plan of a preset or product, as this tree makes it."""
    num_ranks, batch_size = PRESETS[name]
    return sw.Plan.preset(name, num_ranks, batch_size=batch_size)


def write_all():
    """Write the plan of every preset."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in PRESETS:
        (FOLDER / f"{name}.toml").write_text(plan_to_toml(preset(name)))
