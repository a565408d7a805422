from .failing_reward import (
    FAILURES as FAILURES,
    LIST_FAILURES as LIST_FAILURES,
    PROCESS_FAILURES as PROCESS_FAILURES,
    release_hung as release_hung,
)
from .fake_server import FakeServer as FakeServer
from .findings import findings_of as findings_of
from .finished_run import finished_run as finished_run
from .groups import SimulatedGroup as SimulatedGroup
from .objectives import (
    ObjectiveUpdate as ObjectiveUpdate,
    PlannedObjective as PlannedObjective,
    spec_of as spec_of,
    update_of as update_of,
)
from .processes import (
    ProcessRanks as ProcessRanks,
    Rank as Rank,
)
from .replicas import (
    replica_context as replica_context,
    send_weights as send_weights,
)
from .resumed import resumed_state as resumed_state
from .samples import make_sample as make_sample
from .scripted_rollout import (
    Script as Script,
    ScriptedRollout as ScriptedRollout,
)
from .scripted_run import (
    ScriptedExperience as ScriptedExperience,
    ScriptedRun as ScriptedRun,
)
from .table_engine import TableEngine as TableEngine
from .temporary import temporary_plugins as temporary_plugins
from .tiny import (
    template_tokenizer as template_tokenizer,
    tiny_model as tiny_model,
    tiny_model_and_tokenizer as tiny_model_and_tokenizer,
    tiny_tokenizer as tiny_tokenizer,
)
from .tiny_vision import (
    square as square,
    tiny_vision_model as tiny_vision_model,
)
from .transport_ends import (
    TransportEnd as TransportEnd,
    TransportPlace as TransportPlace,
)
