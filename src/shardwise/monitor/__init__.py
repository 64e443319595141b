"""Displays of a run during and after training: a terminal view, a local web page and experiment trackers."""
