"""Further reward functions: formats, similarity, choices, JSON, instructions, and penalties."""
