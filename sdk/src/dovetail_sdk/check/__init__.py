"""`dovetail plugins check`: checks an installed plugin's class, packaging and docstrings, and runs its conformance suite, in a process
of its own.
"""
