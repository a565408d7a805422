from . import (
    batch as batch,
    config as config,
    data as data,
    diagnosis as diagnosis,
    dispatch as dispatch,
    errors as errors,
    hooks as hooks,
    interfaces as interfaces,
    media as media,
    metrics as metrics,
    planning as planning,
    plugins as plugins,
    random_streams as random_streams,
    runs as runs,
    scoring as scoring,
    sections as sections,
    telemetry as telemetry,
    transports as transports,
    workers as workers,
)
from .api import (
    check as check,
    open_model as open_model,
    plan as plan,
    resume as resume,
    train as train,
)

__version__: str
