from .future import Future as Future
from .mesh import Mesh as Mesh
from .registration import (
    Dispatch as Dispatch,
    ModeSpec as ModeSpec,
    Unit as Unit,
    nd as nd,
    register as register,
    registered_methods as registered_methods,
)
from .worker import Worker as Worker
