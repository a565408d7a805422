"""Recipes of public datasets, one per module."""
