from .adapters import (
    adapter_parameters as adapter_parameters,
    planned_adapter as planned_adapter,
)
from .counts import count as count
from .lookup import (
    Selected as Selected,
    generates as generates,
    has_critic as has_critic,
    selected as selected,
)
from .model_shape import (
    BYTES as BYTES,
    ModelShape as ModelShape,
    has_matrix as has_matrix,
    read_shape as read_shape,
)
from .models import ModelRole as ModelRole
from .plan import Plan as Plan, make_plan as make_plan
