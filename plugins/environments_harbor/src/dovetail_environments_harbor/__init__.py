"""The environment `harbor`: tasks in Harbor's format."""
