"""Tools that a policy can call, and parsers of tool calls."""
