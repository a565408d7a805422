from .future import Future as Future
from .mesh import Mesh as Mesh
from .profiling import recorder as recorder
from .registration import (
    Dispatch as Dispatch,
    ModeSpec as ModeSpec,
    Unit as Unit,
    nd as nd,
    register as register,
)
from .worker import Worker as Worker
