"""The live guard: detects hangs, mismatched collectives, stragglers, replica drift and network partitions."""
