"""Fault injection into the user's own job, and whether each fault is named and the run recovers."""
