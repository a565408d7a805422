"""A run: built from its plan, its steps, its checkpoints."""
