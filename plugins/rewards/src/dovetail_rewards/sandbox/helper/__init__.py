"""The sandbox's helper: a small separate process that confines and runs programs. It uses the standard library only.

The helper is started as the package `helper`, with an empty environment and without site packages. No module imports Dovetail.
"""
