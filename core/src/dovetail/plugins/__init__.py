"""The plugin index: the installed plugins, which of them work with this core, and how a plugin is loaded.

Names load on first use; `__init__.pyi` lists the public ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
