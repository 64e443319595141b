"""One technique of parallelism per file; apply.py holds their order."""
