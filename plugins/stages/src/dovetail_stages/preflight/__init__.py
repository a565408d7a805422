"""Preflight rules about the algorithm. Each rule finds one misconfiguration that raises no error in a run."""
