"""What this machine has: GPUs through NVML, cores through the kernel; no torch."""

from shardwise.hardware.memory import available_memory
from shardwise.hardware.oom import oom_kills
from shardwise.hardware.probe import Gpu, probe_gpus, usable_cores

__all__ = ["Gpu", "available_memory", "oom_kills", "probe_gpus", "usable_cores"]
