"""Facts from a model's files, without its weights: its config, class, limits and shape."""
