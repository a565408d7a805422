"""Config classes, a module for each kind of plugin. Nothing here imports torch."""
