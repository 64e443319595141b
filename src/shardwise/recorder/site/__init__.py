"""The folder that is first on PYTHONPATH of a new interpreter, which imports `sitecustomize` from it."""
