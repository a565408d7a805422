"""What is wrong with a run, from its rows of metrics: the cause, the figure that shows it, the key to change.

Names load on first use; `__init__.pyi` lists the public ones. The package imports nothing else of Dovetail.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
