"""Further reward functions: formats, similarity, multiple choice, JSON, instructions, and penalties."""
