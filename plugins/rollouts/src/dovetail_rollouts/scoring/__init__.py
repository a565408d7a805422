"""Scoring of samples: the choice of a row's reward function, the scorer during generation, and a trial of rewards outside a run."""
