"""Policy losses, one a module."""
