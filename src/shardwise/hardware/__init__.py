"""What this machine has: GPUs through NVML, cores through the kernel; no torch."""

from shardwise.hardware.probe import Gpu, available_memory, oom_kills, probe_gpus, usable_cores

__all__ = ["Gpu", "available_memory", "oom_kills", "probe_gpus", "usable_cores"]
