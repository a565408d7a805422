"""Sample filters, one a module."""
