"""Training jobs: the Job with its loss, metrics and LoRA adapters, and the loading of job files."""

from shardwise.job.job import Job
from shardwise.job.load import JobReference, load_job, refer
from shardwise.job.lora import Lora
from shardwise.job.losses import Loss, Metric

__all__ = ["Job", "JobReference", "Lora", "Loss", "Metric", "load_job", "refer"]
