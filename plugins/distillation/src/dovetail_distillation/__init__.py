"""Distillation: a student learns from the log-probabilities of teachers."""
