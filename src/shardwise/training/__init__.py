"""Training: build, the loop, evaluation, checkpoints and the report."""
