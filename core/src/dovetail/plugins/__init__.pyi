from . import environment as environment
from .asking import ask as ask
from .exit_guard import guard_exit as guard_exit
from .index import default_index as default_index
from .isolation import (
    EnvironmentInfo as EnvironmentInfo,
    environment_problems as environment_problems,
    facts_here as facts_here,
    facts_of as facts_of,
    interpreter_of as interpreter_of,
    plugins_of_roles as plugins_of_roles,
    require_environment as require_environment,
)
from .load import (
    load_plugin_class as load_plugin_class,
    make_plugin as make_plugin,
    plugin_section as plugin_section,
    ref_for as ref_for,
)
from .needs import ISOLATED as ISOLATED
from .objectives import (
    loss_aggregation as loss_aggregation,
    objective_spec as objective_spec,
)
from .probe import probed as probed
from .titles import (
    broken_plugin as broken_plugin,
    called as called,
    describe as describe,
    title_of as title_of,
)
