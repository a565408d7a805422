"""Reward managers, reward functions, and what further reward functions share with them.

Names load on first use; `__init__.pyi` lists the public ones. Programs run in `dovetail_rewards.sandbox`, which is public too.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
