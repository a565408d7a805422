"""Worker groups and rollout replicas as Ray actors, over many processes, accelerators and machines."""
