"""Environments of OpenEnv."""
