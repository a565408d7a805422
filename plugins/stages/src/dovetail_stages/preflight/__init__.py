"""Rules about the algorithm: each finds one silent misconfiguration before step 1."""
