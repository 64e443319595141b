"""Which plan to take, and why not the others."""
