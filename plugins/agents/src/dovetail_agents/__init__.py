"""Agent loops in which a policy calls tools, and the set of tools that a loop calls.

Names load on first use; `__init__.pyi` lists the public ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
