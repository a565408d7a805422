"""Test doubles and tiny models for plugin authors. Names load on first use; `__init__.pyi` lists them."""

import lazy_loader

from dovetail_sdk.extras import naming_the_extra

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = naming_the_extra(_load)
