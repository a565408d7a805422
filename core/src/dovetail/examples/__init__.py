"""Where the samples of a run that trains on a dataset come from: conversations, preference pairs, rated responses."""
