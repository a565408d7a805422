"""Parsers of tool calls, a family of models each."""
