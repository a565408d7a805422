"""The commands `eval`, `generate` and `chat`."""
