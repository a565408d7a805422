from .adapters import adapters_of as adapters_of
from .counts import count as count
from .lookup import (
    Selected as Selected,
    generates as generates,
    has_critic as has_critic,
    selected as selected,
)
from .models import ModelRole as ModelRole
from .plan import Plan as Plan, make_plan as make_plan
from .resolved_plugins import source_facts as source_facts
