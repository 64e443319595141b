"""Fault injection into the user's job, to check that each fault is reported and the run recovers."""
