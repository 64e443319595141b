"""The folder that a fresh interpreter is shown first, for its `sitecustomize`."""
