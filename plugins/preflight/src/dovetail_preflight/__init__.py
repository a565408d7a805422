"""Preflight rules about the keys of core. Each rule finds one misconfiguration before the first step."""
