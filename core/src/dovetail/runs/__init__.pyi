from .frames import load as load
from .overview import state_of as state_of
