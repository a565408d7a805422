"""Stand-ins for verl's tools."""
