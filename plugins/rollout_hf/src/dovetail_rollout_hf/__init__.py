"""A rollout engine: a transformers model with a decode loop of its own."""
