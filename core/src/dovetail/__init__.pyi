from . import (
    batch as batch,
    checkpoint as checkpoint,
    cli as cli,
    config as config,
    dispatch as dispatch,
    errors as errors,
    file_locks as file_locks,
    hooks as hooks,
    interfaces as interfaces,
    metrics as metrics,
    planning as planning,
    plugins as plugins,
    random_streams as random_streams,
    run as run,
    sections as sections,
    telemetry as telemetry,
    text as text,
    workers as workers,
)
from .api import (
    check as check,
    plan as plan,
    resume as resume,
    train as train,
)

__version__: str
