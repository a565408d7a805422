"""What training engines share: how samples are cut, attended to, stored, and what ranks tell each other.

Public for plugins: `ranks` (failing together), `parts` (samples into micro-batches), `sequences` and `varlen` (attention over
samples that lie end to end), `stored` (a checkpoint's tensors by name), `random_state`, `schedule`, `columns`.
"""
