"""Distillation: trains a student model on the log-probabilities of teacher models."""
