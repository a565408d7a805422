"""Config classes, a module for each kind of plugin. None of the modules imports torch."""
