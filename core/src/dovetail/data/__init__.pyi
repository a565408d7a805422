from .encoding import (
    Marked as Marked,
    TextEncoder as TextEncoder,
    unmarked as unmarked,
)
from .example_kinds import advice_on_column as advice_on_column
from .ledger import Ledger as Ledger
from .loader import PromptLoader as PromptLoader
from .loading import (
    Data as Data,
    load_prompt_data as load_prompt_data,
    read_prompts as read_prompts,
)
from .message_form import SENTINEL as SENTINEL, message_form as message_form
from .mixtures import share_metrics as share_metrics
from .model_facts import (
    ModelFacts as ModelFacts,
    max_positions as max_positions,
    model_directory as model_directory,
    refuse_missing_model as refuse_missing_model,
)
from .prompts import PromptSet as PromptSet, read_rows as read_rows
from .rendering import check_template as check_template
from .rows import NumberedRow as NumberedRow
from .schema import parse_row as parse_row
from .tokenizer import load_tokenizer as load_tokenizer
