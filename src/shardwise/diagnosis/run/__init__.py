"""Post-mortem of a run from its directory."""
