"""The plan of a run: which plugins, stages, models and places it needs, decided before anything starts."""
