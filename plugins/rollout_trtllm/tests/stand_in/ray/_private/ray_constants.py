"""What of Ray's own is set: see `start_ray`."""

ENABLE_RAY_CLUSTER = True
