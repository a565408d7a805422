"""A rollout engine on SGLang servers, started by the run or running already."""
