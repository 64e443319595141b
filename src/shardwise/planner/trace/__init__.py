"""A job's model traced on meta tensors: memory and work of each part."""
