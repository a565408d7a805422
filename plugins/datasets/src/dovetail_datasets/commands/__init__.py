"""The commands `dovetail data look` and `dovetail data check`."""
