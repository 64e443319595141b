"""One technique of parallelism per file; apply.py has their order."""
