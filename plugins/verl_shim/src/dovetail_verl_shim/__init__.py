"""Stand-ins for the modules that files written for verl import, and a dataset source for verl's dataset classes."""
