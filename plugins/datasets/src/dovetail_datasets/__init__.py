"""What a run reads: rows of datasets as prompts and examples, tokenizers and chat templates, images, and what a model's files say of it.

Names load on first use; `__init__.pyi` lists the public ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
