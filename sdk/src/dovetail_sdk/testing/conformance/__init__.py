"""The conformance kit: subclass the suite of your plugin's kind, name your plugin, and run pytest.

from dovetail_sdk.testing.conformance import AdvantageConformance

class TestMyEstimator(AdvantageConformance):
plugin = MyEstimator
"""

import pkgutil

import lazy_loader
import pytest

# A failing assert of the kit shows its values in a plugin's own test run, as one in a test file does.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
