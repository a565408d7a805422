"""The plugin index: what is installed, whether it fits, and how it is loaded by name. Private to core."""
