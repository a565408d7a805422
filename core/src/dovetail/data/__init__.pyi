from .encoding import Marked as Marked, TextEncoder as TextEncoder
from .ledger import Ledger as Ledger
from .loader import PromptLoader as PromptLoader
from .loading import Data as Data, load_prompt_data as load_prompt_data
from .model_facts import (
    ModelFacts as ModelFacts,
    max_positions as max_positions,
    model_directory as model_directory,
    refuse_missing_model as refuse_missing_model,
)
from .prompts import PromptSet as PromptSet
