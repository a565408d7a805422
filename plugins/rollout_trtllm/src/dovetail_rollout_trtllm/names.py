"""The names of a model's tensors: an update with missing or unknown tensors is refused before it is written to disk."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.errors import WeightSyncError
from dovetail.sections import ModelSection
from dovetail_datasets import read_config
from dovetail_serving import refuse_missing_weights


def refuse_other_tensors(model: ModelSection, sent: Iterable[str]) -> None:
    """Check that an update has exactly the tensors of the model, if transformers knows the model.

    Args:
        model: a model in Hugging Face format.
        sent: the names of the update's tensors. Buffers are allowed, and one of several tied tensors is enough.

    Raises:
        WeightSyncError: tensors are missing or unknown.
    """
    import torch
    from transformers import AutoModelForCausalLM

    trust = model.trust_remote_code
    try:
        config = read_config(model)
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except (OSError, ValueError, KeyError):
        return
    tied: dict[int, set[str]] = {}
    for name, parameter in made.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), set()).add(name)
    given = set(sent)
    refuse_missing_weights(sorted(min(group) for group in tied.values() if not group & given))
    unknown = given.difference(*tied.values(), (name for name, _ in made.named_buffers()))
    if unknown:
        raise WeightSyncError(
            f"the weight update has tensors that the model does not have: {', '.join(sorted(unknown)[:3])}",
            hint="send every tensor of the model by its Hugging Face name, and no others",
        )
