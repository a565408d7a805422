from .checks import (
    Bucket as Bucket,
    bucketed as bucketed,
    gather_the_rest as gather_the_rest,
    matched as matched,
    received_whole as received_whole,
)
from .tensor_digest import DeferredDigests as DeferredDigests
