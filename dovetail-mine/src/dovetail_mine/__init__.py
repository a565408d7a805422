"""The advantage mine for Dovetail."""
