from .adapter_check import without_room as without_room
from .arguments import (
    has_tokenizer as has_tokenizer,
    merged_arguments as merged_arguments,
    model_of as model_of,
    replica_seed as replica_seed,
    starts_empty as starts_empty,
    unknown_argument as unknown_argument,
)
from .backend import (
    Backend as Backend,
    SampleCall as SampleCall,
    SampleResult as SampleResult,
)
from .connection import ServerConnection as ServerConnection
from .counter_delta import CounterDelta as CounterDelta
from .counters import Counters as Counters
from .division import (
    divisors as divisors,
    experts_of as experts_of,
    refuse_indivisible as refuse_indivisible,
)
from .environment import (
    free_bytes as free_bytes,
    log_path as log_path,
    visible_devices as visible_devices,
)
from .failures import (
    Failures as Failures,
    Known as Known,
)
from .frames import (
    MEDIA_TYPE as MEDIA_TYPE,
    Frame as Frame,
)
from .joined_model import (
    model_problems as model_problems,
    shape_of as shape_of,
)
from .joining import (
    DESCRIBE as DESCRIBE,
    answers_of as answers_of,
    port_of as port_of,
    refuse_problems as refuse_problems,
)
from .messages import (
    PREFIX as PREFIX,
    PROTOCOL as PROTOCOL,
)
from .model_loading import (
    refuse_missing_weights as refuse_missing_weights,
    without_adapters as without_adapters,
)
from .own_server import (
    OwnServer as OwnServer,
    port_for as port_for,
)
from .process import (
    LOOPBACK as LOOPBACK,
    ServerProcess as ServerProcess,
    free_port as free_port,
)
from .releases import (
    DrivenEngine as DrivenEngine,
    Release as Release,
    missing_names as missing_names,
    number_of as number_of,
)
from .rollout import ServingRollout as ServingRollout
from .routes import (
    Application as Application,
    Host as Host,
    Receive as Receive,
    Routes as Routes,
    Scope as Scope,
    Send as Send,
)
from .section import (
    PORT as PORT,
    AdaptedSection as AdaptedSection,
    ServingSection as ServingSection,
    spread_over_ranks as spread_over_ranks,
)
from .server_backend import ServerBackend as ServerBackend
from .weight_wire import (
    Outcome as Outcome,
    WeightEnd as WeightEnd,
    end_from as end_from,
    first_failed as first_failed,
    manifest_from as manifest_from,
    manifest_info as manifest_info,
    merged_outcomes as merged_outcomes,
    outcome_of as outcome_of,
    transport_info as transport_info,
)
