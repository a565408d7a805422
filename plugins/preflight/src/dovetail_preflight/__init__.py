"""Preflight rules on the keys of core: each finds one silent misconfiguration before step 1."""
