"""Trainers: the schedules of a run."""
