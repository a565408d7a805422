"""TRL: its configs in Python files and YAML."""
