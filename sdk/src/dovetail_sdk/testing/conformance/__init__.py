"""The conformance kit: subclass the suite of your plugin's kind, name your plugin, and run pytest.

from dovetail_sdk.testing.conformance import AdvantageConformance

class TestMyEstimator(AdvantageConformance):
plugin = MyEstimator
"""

import pkgutil

import lazy_loader
import pytest

from dovetail_sdk.extras import naming_the_extra

# Rewritten, so that a failing assert of the kit shows its values, as an assert in a test file does.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
)

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = naming_the_extra(_load)
