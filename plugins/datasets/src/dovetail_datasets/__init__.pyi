from .recipe import (
    DataRecipe as DataRecipe,
    LeftOut as LeftOut,
    RecipeSection as RecipeSection,
    text_of as text_of,
    value_of as value_of,
)
