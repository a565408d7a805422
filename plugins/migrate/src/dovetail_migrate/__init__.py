"""Commands and configs of verl and TRL become Dovetail configs, with a report of every key."""
