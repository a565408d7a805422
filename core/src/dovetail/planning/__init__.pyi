from .adapters import planned_adapter as planned_adapter
from .model_shape import (
    ModelShape as ModelShape,
    has_matrix as has_matrix,
    read_shape as read_shape,
)
from .models import ModelRole as ModelRole
from .plan import Plan as Plan, make_plan as make_plan
