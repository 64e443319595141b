"""The command line: one module per command, imported without torch."""
