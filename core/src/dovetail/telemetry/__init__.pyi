from . import figures as figures
from .jsonl import read_rows as read_rows
from .logging import get_logger as get_logger
from .run_directory import RunDirectory as RunDirectory
from .terminal import (
    Terminal as Terminal,
    visible as visible,
)
