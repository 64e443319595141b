"""Links between pairs of ranks."""
