from .logging import get_logger as get_logger
from .report import write_report as write_report
from .run_directory import RunDirectory as RunDirectory
from .terminal import (
    Terminal as Terminal,
    visible as visible,
)
