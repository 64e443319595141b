"""Parity on the user's own job: every plan trained beside one process, and what differs named."""
