"""Diagnosis of a machine, its environment variables, its network or a run, with fixes."""
