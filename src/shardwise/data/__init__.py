"""The stream of samples: their order, each reader's slice, and the datasets that ship."""
