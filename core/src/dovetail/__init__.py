"""Dovetail: reinforcement-learning post-training of language models, where everything plugs in.

Public packages are listed in `__init__.pyi` beside this file, public names in each package's own `__init__.pyi`. Everything loads on first
use, so that `import dovetail` costs nothing.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
