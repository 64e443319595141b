"""Hardware of this machine and of clusters, without torch: GPUs from NVML, cores and memory from the kernel."""

from shardwise.hardware.probe import Gpu, available_memory, oom_kills, probe_gpus, usable_cores

__all__ = ["Gpu", "available_memory", "oom_kills", "probe_gpus", "usable_cores"]
