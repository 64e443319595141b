"""Token sources: documents of token ids in memory-mapped files, with random access by chunk; no torch."""
