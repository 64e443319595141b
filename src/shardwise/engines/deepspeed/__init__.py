"""The DeepSpeed engine; modules import DeepSpeed only if their docstring states so."""
