"""Weight transports between the processes of a trainer and of a rollout."""
