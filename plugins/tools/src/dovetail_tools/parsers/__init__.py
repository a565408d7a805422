"""Parsers of tool calls, one for each family of models."""
