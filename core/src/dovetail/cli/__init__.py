"""The `dovetail` command: one module a subcommand, imported when it is used."""
