"""A rollout engine: a transformers model with continuous batching in this process."""
