"""DeepSpeed as an engine; only the modules that say so import it."""
