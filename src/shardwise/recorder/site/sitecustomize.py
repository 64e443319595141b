"""What a rank that is a fresh interpreter imports before its script: the record begins here."""

from shardwise.recorder.start import start_here

start_here()
