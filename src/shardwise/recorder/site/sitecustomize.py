"""What a rank that is a fresh interpreter imports before its script: the record begins here."""

from shardwise.recorder.fresh import start_here

start_here()
