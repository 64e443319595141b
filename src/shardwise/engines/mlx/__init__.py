"""MLX as an engine: its step behind ours, its ring joined by our world."""
