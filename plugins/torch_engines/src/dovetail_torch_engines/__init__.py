"""What training engines share: micro-batches, attention over packed sequences, the output layer, adapters, training states, and sending weights.

Names load on first use; `__init__.pyi` lists the public ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
