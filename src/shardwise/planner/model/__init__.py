"""What planning knows of a model: its shape, in closed form for published ones."""
