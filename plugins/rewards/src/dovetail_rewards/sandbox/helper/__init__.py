"""The sandbox's helper: a small separate process that confines and runs programs, and uses the standard library only.

It is started with an empty environment and without site packages, as the package `helper`; nothing here imports Dovetail.
"""
