from .data import read_tokenizer as read_tokenizer
from .export import export_checkpoint as export_checkpoint
