from .recipe import (
    DataRecipe as DataRecipe,
    RecipeSection as RecipeSection,
    UnusedRow as UnusedRow,
    messages_of as messages_of,
    text_of as text_of,
    value_of as value_of,
    wrong as wrong,
)
