"""Descriptions of models for planning, in closed form for published models."""
