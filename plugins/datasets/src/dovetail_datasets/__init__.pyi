from .recipe import (
    DataRecipe as DataRecipe,
    LeftOut as LeftOut,
    RecipeSection as RecipeSection,
    messages_of as messages_of,
    text_of as text_of,
    value_of as value_of,
    wrong as wrong,
)
