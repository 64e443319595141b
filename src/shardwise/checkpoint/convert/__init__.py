"""Conversion between checkpoint formats: every format is read into Contents and written from it."""
