"""Stages and a trainer for Dovetail."""
