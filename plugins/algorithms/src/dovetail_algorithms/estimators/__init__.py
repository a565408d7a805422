"""Advantage estimators, one per module."""
