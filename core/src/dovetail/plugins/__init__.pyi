from .asking import ask as ask
from .entry import STATES as STATES, PluginEntry as PluginEntry
from .exit_guard import guard_exit as guard_exit
from .index import default_index as default_index
from .load import (
    load_plugin_class as load_plugin_class,
    make_plugin as make_plugin,
    plugin_section as plugin_section,
    ref_for as ref_for,
)
from .lock import (
    lock_for as lock_for,
    now_for as now_for,
    read_lock as read_lock,
    write_lock as write_lock,
)
from .lock_differences import differences as differences
from .manifest import (
    PluginManifest as PluginManifest,
    package_directories as package_directories,
)
from .needs import ISOLATED as ISOLATED, torch_build as torch_build
from .objectives import (
    loss_aggregation as loss_aggregation,
    objective_spec as objective_spec,
)
from .rules import installed_rules as installed_rules
from .titles import (
    broken_plugin as broken_plugin,
    called as called,
    describe as describe,
    title_of as title_of,
)
