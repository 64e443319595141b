"""Runs on several nodes: rendezvous, the hub on node 0, and rounds."""
