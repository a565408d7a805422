"""Advantage estimators, one a module."""
