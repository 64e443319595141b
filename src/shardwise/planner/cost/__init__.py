"""Predicted cost of a plan on a cluster: memory, traffic and time."""
