"""How samples are scored: which function scores a row, the scorer beside generation, and a trial of rewards outside a run.

Public for plugins: `functions` (what a reward section selects), `scorer` (units to a manager, with limits and retries) and `trial`.
"""
