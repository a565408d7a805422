from .data import load_data as load_data
