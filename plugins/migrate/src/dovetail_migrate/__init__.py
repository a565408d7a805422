"""Translates commands and configs of verl and TRL to Dovetail configs, with a report of every key."""
