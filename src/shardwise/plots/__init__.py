"""Plots for every report: figures as values, drawn as SVG or as characters. No torch."""
