"""Datasets by name: each is a source, a callable from split ("train" or "test") to a torch Dataset."""

from shardwise.data.datasets.byte_text import TextDataset, text
from shardwise.data.datasets.images import ImageDataset, digits, fashion_mnist, idx_folder, mnist

__all__ = ["ImageDataset", "TextDataset", "digits", "fashion_mnist", "idx_folder", "mnist", "text"]
