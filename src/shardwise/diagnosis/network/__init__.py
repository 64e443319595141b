"""Checks of a cluster's network, run from one machine."""
