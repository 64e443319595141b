"""Data loading: the order of samples, the slices of data-parallel ranks, and the datasets that ship with shardwise."""
