from .compute import turn as turn
from .group import (
    RankFailure as RankFailure,
    WorkerGroup as WorkerGroup,
)
from .host import (
    WorkerHost as WorkerHost,
    stacks as stacks,
)
from .inline import InlineGroup as InlineGroup
from .loading import (
    await_turn as await_turn,
    turn_path as turn_path,
)
from .lock import (
    check_plugins as check_plugins,
    plugins_here as plugins_here,
)
from .loop_thread import LoopThread as LoopThread
from .modes import (
    PADDING as PADDING,
    resolve_mode as resolve_mode,
    unit_ids as unit_ids,
)
from .processes import (
    environment_variables as environment_variables,
    join_processes as join_processes,
    leave_processes as leave_processes,
    reduction_over as reduction_over,
)
