"""Shape checks of the interfaces' classes in every test; jaxtyping's import hook checks the numerics modules."""

import pytest

from dovetail.interfaces import Advantages, Groups, LossInputs, ObjectiveTerm, TokenLosses
from dovetail_sdk.testing.shapes import checked


@pytest.fixture(scope="module", autouse=True)
def interface_shapes():
    with checked(Advantages, Groups, LossInputs, TokenLosses, ObjectiveTerm):
        yield
