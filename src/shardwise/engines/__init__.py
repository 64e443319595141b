"""Other engines behind the same Step."""
