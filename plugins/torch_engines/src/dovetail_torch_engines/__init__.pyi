from .adapter import (
    ADAPTER as ADAPTER,
    MAGNITUDE as MAGNITUDE,
    described as described,
    drawn_a as drawn_a,
    no_matrix as no_matrix,
    shared_weight as shared_weight,
    state_name as state_name,
    wire_name as wire_name,
)
from .adapter_files import (
    adapter_tensors as adapter_tensors,
    write_adapter as write_adapter,
)
from .columns import (
    columns_read as columns_read,
    empty_columns as empty_columns,
    ids_column as ids_column,
    read_at as read_at,
)
from .failing_rows import (
    failing_rows as failing_rows,
    unit_rows as unit_rows,
)
from .fused_head import (
    CHUNK_BYTES as CHUNK_BYTES,
    fused_scores as fused_scores,
    fuses as fuses,
)
from .lora import (
    ALL_LINEAR as ALL_LINEAR,
    AdaptableSection as AdaptableSection,
    LoraSection as LoraSection,
    Sync as Sync,
)
from .optimizers import (
    build_optimizer as build_optimizer,
    hidden_matrices as hidden_matrices,
    learning_rates as learning_rates,
    set_learning_rates as set_learning_rates,
)
from .parts import (
    MicroBatchRows as MicroBatchRows,
    Samples as Samples,
    distinct as distinct,
    packed_parts as packed_parts,
    padded_parts as padded_parts,
    rows_of as rows_of,
    shared_parts as shared_parts,
)
from .random_states import (
    RandomState as RandomState,
    random_file as random_file,
    stored_random_state as stored_random_state,
)
from .ranks import Ranks as Ranks
from .safetensors_files import (
    SafetensorsStore as SafetensorsStore,
    SafetensorsWriter as SafetensorsWriter,
)
from .schedule import LearningRate as LearningRate
from .scored import (
    Scored as Scored,
    token_places as token_places,
)
from .sending import Sending as Sending
from .sequences import (
    Sequences as Sequences,
    sent as sent,
)
from .state import (
    MOMENTS as MOMENTS,
    WEIGHTS as WEIGHTS,
    emptied as emptied,
    read_facts as read_facts,
    unwritable as unwritable,
    was_trained as was_trained,
    write_facts as write_facts,
)
from .stored import StoredCheckpoint as StoredCheckpoint
from .torch_engine import TorchEngine as TorchEngine
from .ulysses import (
    ScoredShare as ScoredShare,
    to_heads as to_heads,
    to_tokens as to_tokens,
)
from .value_head import (
    VALUE_HEADS as VALUE_HEADS,
    stored_value_head as stored_value_head,
)
from .varlen import (
    attend as attend,
    has_flash as has_flash,
)
from .vocabulary import Vocabulary as Vocabulary
