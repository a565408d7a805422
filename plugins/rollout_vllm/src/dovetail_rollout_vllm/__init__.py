"""A rollout engine on vLLM."""
