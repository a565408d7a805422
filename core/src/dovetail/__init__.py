"""Dovetail: reinforcement-learning post-training of language models, where everything plugs in.

What is public is listed in one place each: the packages in `__init__.pyi` beside this file, and each package's names in
its own `__init__.pyi`. Everything loads on first use, so that `import dovetail` costs nothing.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
