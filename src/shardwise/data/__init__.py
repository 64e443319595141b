"""The stream of samples: their order, each data-parallel rank's slice, and the datasets that ship."""
