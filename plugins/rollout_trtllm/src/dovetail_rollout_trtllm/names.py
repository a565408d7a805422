"""Which tensors make a model whole: TensorRT-LLM loads what it knows of what it is given, and says nothing of the rest."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from dovetail.errors import WeightSyncError
from dovetail.sections import ModelSection

_SHOWN = 3


@attrs.frozen
class TensorNames:
    """The names of a model's tensors in Hugging Face form."""

    tied: tuple[frozenset[str], ...]
    """The names of each parameter; of several, one is enough."""
    further: frozenset[str]
    """Those of buffers, which may come too."""

    @classmethod
    def of(cls, model: ModelSection) -> TensorNames | None:
        """Read them off the model's class in transformers, without memory for it; None where it has none."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(
                model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
            with torch.device("meta"):
                made = AutoModelForCausalLM.from_config(
                    config, trust_remote_code=model.trust_remote_code
                )
        except (OSError, ValueError, KeyError):
            return None
        names: dict[int, set[str]] = {}
        for name, parameter in made.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), set()).add(name)
        buffers = frozenset(name for name, _ in made.named_buffers())
        return cls(tuple(frozenset(group) for group in names.values()), buffers)

    def refuse_other(self, version: int, sent: Collection[str]) -> None:
        """Do nothing where these are the model's tensors, all of them and no others.

        Raises:
            WeightSyncError: they are not.
        """
        given = set(sent)
        missing = sorted(min(group) for group in self.tied if not group & given)
        unknown = sorted(given.difference(self.further, *self.tied))
        for names, problem in (
            (missing, "has nothing for"),
            (unknown, "has what is not the model's:"),
        ):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise WeightSyncError(
                    f"weight update {version} {problem} {', '.join(names[:_SHOWN])}{more}",
                    hint="send every tensor of the model by its Hugging Face name",
                )
