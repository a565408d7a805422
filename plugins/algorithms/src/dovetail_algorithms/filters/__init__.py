"""Sample filters, one per module."""
