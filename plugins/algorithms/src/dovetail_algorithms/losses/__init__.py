"""Policy losses, one per module."""
