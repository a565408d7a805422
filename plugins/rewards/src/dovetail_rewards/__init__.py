"""Reward managers, reward functions, and helpers for further reward functions.

Names load on first use; `__init__.pyi` lists the public ones. The sandbox, `dovetail_rewards.sandbox`, is public too.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
