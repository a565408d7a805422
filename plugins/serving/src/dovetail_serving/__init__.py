"""Common parts of rollouts on serving engines: requests, pauses, weights, servers and the protocol. This package imports no engine.

A name is imported from its module on first use; `__init__.pyi` lists the public names.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
