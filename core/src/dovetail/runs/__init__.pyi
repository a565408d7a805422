from .frames import load as load
