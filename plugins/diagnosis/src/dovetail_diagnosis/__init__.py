"""What a run's metrics say: its key figures, what is wrong with it and which key to change, its files as data frames.

Names load on first use; `__init__.pyi` lists the public ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
