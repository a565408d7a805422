"""Tasks of Harbor."""
