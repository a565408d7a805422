"""How weights travel from a trainer to a rollout: the transports that core ships."""
