"""Checkpoints on disk: whole or not there, and known to be undamaged."""
