"""Collectives: timed, checked, judged."""
