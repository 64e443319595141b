"""Measuring this machine: collectives, operators, memory, and whole steps of a job."""
