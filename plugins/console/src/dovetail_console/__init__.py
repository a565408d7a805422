"""The terminal interface of runs: the tracker `console`, commands such as `plan`, `runs`, `watch` and `doctor`, and the supervisor
that restarts a failed run.
"""
