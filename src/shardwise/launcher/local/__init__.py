"""Ranks of one machine: forked or started fresh, supervised, restarted."""
