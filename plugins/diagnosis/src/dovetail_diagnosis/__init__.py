"""Diagnosis of a run: its key figures, conditions that keep it from learning with the key to change, and its files as data frames.

Names load on first use; `__init__.pyi` lists the public ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
