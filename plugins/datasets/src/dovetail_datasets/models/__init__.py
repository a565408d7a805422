"""What the files of a model say, without its weights: its config, class, limits and shape."""
