"""Starting, supervising and restarting the ranks of a run; the supervising process imports no torch."""
