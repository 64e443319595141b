"""What to train: the Job, its loss, optimizer and schedule, and how a job file is loaded."""

from shardwise.job.job import Job
from shardwise.job.load import JobReference, load_job, refer
from shardwise.job.lora import Lora
from shardwise.job.losses import Loss, Metric

__all__ = ["Job", "JobReference", "Lora", "Loss", "Metric", "load_job", "refer"]
