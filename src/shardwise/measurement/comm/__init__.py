"""Benchmarks of collectives: times, correctness checks and verdicts."""
