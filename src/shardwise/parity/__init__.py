"""Parity: training under each plan is compared with training in one process, and differences are diagnosed."""
