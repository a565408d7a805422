"""The environment `reasoning_gym`: tasks of the package reasoning-gym, scored by the package's own rules."""
