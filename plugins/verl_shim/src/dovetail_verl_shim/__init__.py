"""Stand-ins for what files written for verl import, and a dataset source for verl's dataset classes."""
