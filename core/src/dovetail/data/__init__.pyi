from .encoding import Marked as Marked, TextEncoder as TextEncoder
from .ledger import Ledger as Ledger
from .loader import PromptLoader as PromptLoader
from .loading import Data as Data, load_prompt_data as load_prompt_data
from .prompts import PromptSet as PromptSet
