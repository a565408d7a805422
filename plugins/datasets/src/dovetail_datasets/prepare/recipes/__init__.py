"""Recipes of public datasets, one a file."""
