"""How samples are scored: which function scores a row, the scorer beside generation, and a trial of rewards outside a run."""
