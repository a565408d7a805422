from .data import load_data as load_data
from .export import export_checkpoint as export_checkpoint
