"""Start, supervise and restart the ranks of a run; the supervising process does not import torch."""
