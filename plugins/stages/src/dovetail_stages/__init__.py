"""The stages of a policy-gradient step, and `Standard`, the `StageSet` plugin that lists these stages in order.

Names load on first use; `__init__.pyi` lists the public ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
