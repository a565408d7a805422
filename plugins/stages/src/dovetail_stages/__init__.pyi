from .standard import Standard as Standard
