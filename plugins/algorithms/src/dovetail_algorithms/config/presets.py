"""Config classes of the presets, and the settings of each. This module imports nothing but config sections.

Presets set no learning rates, batch sizes or lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from dovetail.sections import PresetSection, Validator

_SHARE: Validator = attrs.validators.optional([attrs.validators.gt(0), attrs.validators.le(1)])
_LONGEST = "${data.max_response_length}"
_PPO_CLIP = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2}
_NO_KL = {"in_loss": None, "in_reward": None}
_KL_IN_LOSS = {"in_loss": {"estimator": "k3", "coef": 0.001}, "in_reward": None}
_KL_IN_REWARD = {"in_loss": None, "in_reward": {"estimator": "k1", "coef": 0.001}}
"""Settings of `algorithm.kl` for presets with a KL penalty in the reward. The coefficient 0.001, also of `_KL_IN_LOSS`, is common in
practice; papers use 0.01 to 0.1, for rewards of other scales.
"""


def _algorithm(
    advantage: str,
    policy_loss: str | Mapping[str, Any],
    loss_aggregation: str | Mapping[str, Any],
    kl: Mapping[str, Any],
) -> dict[str, Any]:
    parts = {"policy_loss": policy_loss, "loss_aggregation": loss_aggregation}
    named = {key: {"name": part} if isinstance(part, str) else part for key, part in parts.items()}
    return {"advantage": {"name": advantage}, **named, "kl": kl}


class _WithoutOptions(PresetSection):
    """Base class of presets without options, whose settings are constant."""

    ALGORITHM: ClassVar[Mapping[str, Any]]
    OTHERS: ClassVar[Mapping[str, Any]] = {}
    """Settings outside of `algorithm`."""

    def settings(self) -> Mapping[str, Any]:
        return {"algorithm": self.ALGORITHM, **self.OTHERS}


class PpoPresetConfig(_WithoutOptions):
    """Clipped policy updates over several epochs, with a critic and a KL penalty in the reward."""

    ALGORITHM = _algorithm("gae", _PPO_CLIP, "token_mean", _KL_IN_REWARD)
    OTHERS: ClassVar[Mapping[str, Any]] = {"actor": {"epochs": 4}, "critic": {"value_clip": 0.2}}


class GrpoPresetConfig(_WithoutOptions):
    """Rewards relative to their group, and a KL penalty in the loss."""

    ALGORITHM = _algorithm("grpo", _PPO_CLIP, "seq_mean_token_mean", _KL_IN_LOSS)


class DrGrpoPresetConfig(_WithoutOptions):
    """GRPO without its two divisions, by the group's spread and by the response's length."""

    ALGORITHM = _algorithm(
        "dr_grpo", _PPO_CLIP, {"name": "seq_mean_token_sum_norm", "length": _LONGEST}, _NO_KL
    )


@attrs.frozen(kw_only=True)
class DapoPresetConfig(PresetSection):
    """GRPO with a higher upper clip, token-level loss, dynamic sampling and a soft penalty on long responses."""

    overlong_share: float | None = attrs.field(default=0.2, validator=_SHARE)
    """The penalty on long responses grows over this last share of data.max_response_length; None for no penalty."""
    mask_truncated: bool = False
    """Also mask the loss of responses that were cut off at the length limit (overlong filtering)."""

    def settings(self) -> Mapping[str, Any]:
        clip = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}
        filters = [{"name": "equal_rewards"}]
        if self.mask_truncated:
            filters.append({"name": "overlong"})
        penalty: dict[str, Any] | None = None
        if self.overlong_share is not None:
            buffer = f"${{share:{self.overlong_share},{_LONGEST}}}"
            penalty = {"buffer": buffer, "factor": 1.0}
        return {
            "algorithm": {
                **_algorithm("grpo", clip, "token_mean", _NO_KL),
                "sample_filters": filters,
                "max_generation_rounds": 10,
                "overlong_penalty": penalty,
            }
        }


class GspoPresetConfig(_WithoutOptions):
    """One importance ratio for each sequence, clipped as a whole."""

    ALGORITHM = _algorithm(
        "grpo", {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, "seq_mean_token_mean", _NO_KL
    )


class CispoPresetConfig(_WithoutOptions):
    """A policy gradient whose importance weights are clipped, so that every token keeps its gradient."""

    ALGORITHM = _algorithm("grpo", "cispo", "token_mean", _NO_KL)


class SapoPresetConfig(_WithoutOptions):
    """A smooth gate on the ratio in place of clipping."""

    ALGORITHM = _algorithm("grpo", "sapo", "seq_mean_token_mean", _NO_KL)


class RlooPresetConfig(_WithoutOptions):
    """REINFORCE with a leave-one-out baseline."""

    ALGORITHM = _algorithm("rloo", "reinforce", "token_mean", _KL_IN_REWARD)


class ReinforcePlusPlusPresetConfig(_WithoutOptions):
    """REINFORCE++: advantages are returns whitened over the batch; updates are clipped, and the reward has a KL penalty."""

    ALGORITHM = _algorithm("reinforce_plus_plus", _PPO_CLIP, "token_mean", _KL_IN_REWARD)


class RemaxPresetConfig(_WithoutOptions):
    """REINFORCE with the greedy response's reward as its baseline."""

    ALGORITHM = _algorithm("remax", "reinforce", "token_mean", _KL_IN_REWARD)


class OpoPresetConfig(_WithoutOptions):
    """The plain policy gradient, exactly on-policy, with the length-weighted baseline of least variance."""

    ALGORITHM = _algorithm("opo", "reinforce", "token_mean", _NO_KL)
    OTHERS: ClassVar[Mapping[str, Any]] = {"actor": {"epochs": 1, "mini_batch_size": None}}


class GpgPresetConfig(_WithoutOptions):
    """The plain policy gradient with rewards relative to their group."""

    ALGORITHM = _algorithm("gpg", "gpg", "token_mean", _NO_KL)


class GmpoPresetConfig(_WithoutOptions):
    """The geometric mean of a response's clipped ratios."""

    ALGORITHM = _algorithm(
        "grpo", {"name": "gmpo", "clip_low": 0.4, "clip_high": 0.4}, "seq_mean_token_mean", _NO_KL
    )
