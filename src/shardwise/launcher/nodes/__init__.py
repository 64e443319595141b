"""Runs on several nodes: the rendezvous, the hub on node 0, and the rounds of a run."""
