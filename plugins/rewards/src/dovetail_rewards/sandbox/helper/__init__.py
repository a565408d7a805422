"""The sandbox's helper: a small process of its own, made of the standard library only, that confines and runs programs.

It is started with an empty environment and without site packages, as the package `helper`; nothing here imports Dovetail.
"""
