"""The first folder on PYTHONPATH of a new interpreter, for its `sitecustomize`."""
