"""Further reward functions."""
