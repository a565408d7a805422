"""Agent loops in which a policy calls tools."""
