"""Tasks of reasoning-gym, scored by its own rules."""
