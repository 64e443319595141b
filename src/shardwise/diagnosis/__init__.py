"""What is wrong with a machine, its variables, its network or a run, and what to do about it."""
