"""Benchmarks of this machine: collectives, operators, memory, and complete training steps of a job."""
