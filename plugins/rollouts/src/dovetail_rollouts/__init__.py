"""From prompts to scored samples: the pool of rollout replicas, generation, refill, validation."""
