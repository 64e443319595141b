"""The live guard: hangs, mismatched collectives, stragglers, replica drift and partitions while ranks run."""
