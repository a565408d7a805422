from .encoding import (
    Marked as Marked,
    TextEncoder as TextEncoder,
    unmarked as unmarked,
)
from .example_kinds import advice_on_column as advice_on_column
from .loading import (
    load_prompt_data as load_prompt_data,
    read_prompts as read_prompts,
    read_tokenizer as read_tokenizer,
)
from .media.images import open_image as open_image
from .media.inputs import ImageInputs as ImageInputs
from .media.placeholders import produced_placeholders as produced_placeholders
from .message_form import SENTINEL as SENTINEL, message_form as message_form
from .mixtures import share_metrics as share_metrics
from .models.classes import (
    image_token_of as image_token_of,
    model_class as model_class,
    takes_images as takes_images,
    text_config as text_config,
)
from .models.config import (
    overrides_for_engine as overrides_for_engine,
    read_config as read_config,
)
from .models.facts import (
    ModelFacts as ModelFacts,
    max_positions as max_positions,
    model_directory as model_directory,
    refuse_missing_model as refuse_missing_model,
)
from .models.shape import (
    has_matrix as has_matrix,
    read_shape as read_shape,
)
from .prepare.recipe import (
    DataRecipe as DataRecipe,
    RecipeSection as RecipeSection,
    UnusedRow as UnusedRow,
    messages_of as messages_of,
    text_of as text_of,
    value_of as value_of,
    wrong as wrong,
)
from .prompts import PromptSet as PromptSet, read_rows as read_rows
from .rendering import check_template as check_template
from .rows import NumberedRow as NumberedRow
from .schema import parse_row as parse_row
from .tokenizer import load_tokenizer as load_tokenizer
