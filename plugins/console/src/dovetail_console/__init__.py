"""A run on the terminal: the tracker `console`, and the commands `runs`, `watch` and `doctor`."""
