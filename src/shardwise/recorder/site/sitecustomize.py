"""Starts the recorder in a rank that is a new interpreter, before its script runs."""

from shardwise.recorder.start import start_here

start_here()
