"""Showing a run while it trains or after: in a terminal, on a local page, in experiment trackers."""
