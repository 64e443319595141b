"""Parallelism techniques, one per file; `apply.py` defines the order in which a plan applies them to a model."""
