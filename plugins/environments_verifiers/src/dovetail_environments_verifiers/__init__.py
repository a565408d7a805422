"""The environment `verifiers`: tasksets of the package verifiers."""
