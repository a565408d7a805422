"""The preflight rules that core ships: each finds one silent misconfiguration before step 1."""
