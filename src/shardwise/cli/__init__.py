"""The command line: one small file per verb, no torch at import."""
