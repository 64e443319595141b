"""Plots of all reports: figures as data, rendered as SVG or as text without importing torch."""
