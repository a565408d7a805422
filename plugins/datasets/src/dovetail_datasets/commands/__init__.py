"""`dovetail data`: `look` and `check`."""
