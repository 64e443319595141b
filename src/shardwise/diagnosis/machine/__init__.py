"""Facts about a machine, observed once, and checks of these facts."""
