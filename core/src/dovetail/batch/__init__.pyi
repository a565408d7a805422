from .batch import Batch as Batch
from .columns import GLOSSARY as GLOSSARY, Column as Column, sizes_of as sizes_of
from .ragged import Ragged as Ragged
from .remote import (
    Store as Store,
    StoredArray as StoredArray,
)
from .rows import RaggedRows as RaggedRows
