"""Presets: the settings that a paper combines, under one name. `config/presets.py` has the settings.

A setting that a preset does not set keeps its plugin's default.
"""

from __future__ import annotations

from dovetail.interfaces import Preset
from dovetail_algorithms.config import presets as configs


class _Published(Preset):
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})


class PpoPreset(_Published):
    """PPO (arXiv 1707.06347) as it is used for language models (1909.08593).

    Advantages by GAE from a critic, ratios clipped to 1 ± 0.2, four epochs over each rollout, values clipped to ± 0.2, and a KL penalty per
    token (k1) in the reward, with the customary coefficient 0.001. GAE's γ and λ keep their default of 1: returns have no discount, as is
    customary with one reward at the end. PPO's paper has γ = 0.99 and λ = 0.95; `algorithm.advantage.lam=0.95` sets its λ.

    `actor.mini_batch_size` divides an epoch into several updates.
    """

    name = "ppo"
    Config = configs.PpoPresetConfig


class GrpoPreset(_Published):
    """GRPO (DeepSeekMath, arXiv 2402.03300).

    Rewards relative to their group in units of its standard deviation, ratios clipped to 1 ± 0.2, the mean over responses of each
    response's token mean, and a KL penalty (k3) in the loss. Its coefficient is the customary 0.001; the paper has 0.04.
    """

    name = "grpo"
    Config = configs.GrpoPresetConfig


class DrGrpoPreset(_Published):
    """Dr. GRPO (arXiv 2503.20783): GRPO without the divisions by a group's spread and by a response's length.

    Token losses are summed and divided by the constant data.max_response_length. There is no KL penalty.
    """

    name = "dr_grpo"
    Config = configs.DrGrpoPresetConfig


class DapoPreset(_Published):
    """DAPO (arXiv 2503.14476): GRPO for long reasoning.

    - Clip higher: ratios between 1 − 0.2 and 1 + 0.28.
    - Token-level loss: the mean over all tokens, so that long responses weigh by their length.
    - Dynamic sampling: groups whose rewards are all equal are left out and replaced, in up to 10 rounds of
      generation a step.
    - Soft overlong punishment: a penalty up to 1 on the reward within the last fifth of data.max_response_length,
      the paper's 4,096 of 20,480 tokens. The penalty is made for rewards of ± 1; `overlong_share: null` omits it.
    - Overlong filtering, with `mask_truncated: true`: truncated responses have no loss. Off by default, since the paper replaces it by
      the punishment.

    There is no KL penalty.
    """

    name = "dapo"
    Config = configs.DapoPresetConfig


class GspoPreset(_Published):
    """GSPO (arXiv 2507.18071): the importance ratio of the whole sequence, clipped to (1 − 3e-4, 1 + 4e-4).

    Uses GRPO's advantages and the mean over responses, without a KL penalty. With one update per rollout every ratio is 1 and nothing is
    clipped; the paper uses four mini-batches (`actor.mini_batch_size`).
    """

    name = "gspo"
    Config = configs.GspoPresetConfig


class CispoPreset(_Published):
    """CISPO (MiniMax-M1, arXiv 2506.13585): a policy gradient whose importance weights are clipped and detached.

    Uses GRPO's advantages and the mean over all tokens, without a KL penalty. The paper also uses DAPO's dynamic sampling and length
    penalty: `algorithm.sample_filters=[equal_rewards]`, `algorithm.max_generation_rounds` and `algorithm.overlong_penalty` add them.
    """

    name = "cispo"
    Config = configs.CispoPresetConfig


class SapoPreset(_Published):
    """SAPO (arXiv 2511.20347): a sigmoid gate on the ratio of each token in place of clipping.

    Uses GRPO's advantages and the mean over responses of each response's token mean, without a KL penalty.
    """

    name = "sapo"
    Config = configs.SapoPresetConfig


class RlooPreset(_Published):
    """RLOO (arXiv 2402.14740): REINFORCE with the mean reward of the group's other samples as its baseline.

    No clipping, and a KL penalty per token (k1) in the reward, with the customary coefficient 0.001. The loss is the mean over all tokens;
    its gradient has the direction of the paper's, which sums over each response's tokens. Meant for one update per rollout; for several,
    choose `algorithm.policy_loss=ppo_clip`.
    """

    name = "rloo"
    Config = configs.RlooPresetConfig


class ReinforcePlusPlusPreset(_Published):
    """REINFORCE++ (arXiv 2501.03262): returns whitened over the batch, without critic or groups.

    Ratios clipped to 1 ± 0.2, the mean over all tokens, and a KL penalty per token (k1) in the reward, with the customary coefficient
    0.001.
    """

    name = "reinforce_plus_plus"
    Config = configs.ReinforcePlusPlusPresetConfig


class RemaxPreset(_Published):
    """ReMax (arXiv 2310.10505): REINFORCE with the reward of the greedy response as its baseline.

    No clipping, and a KL penalty per token (k1) in the reward, with the customary coefficient 0.001. The loss is the mean over all tokens;
    its gradient has the direction of the paper's, which sums over each response's tokens. Meant for one update per rollout; for several,
    choose `algorithm.policy_loss=ppo_clip`.
    """

    name = "remax"
    Config = configs.RemaxPresetConfig


class OpoPreset(_Published):
    """OPO (arXiv 2505.23585): the plain policy gradient with the length-weighted baseline of least variance.

    Exactly on-policy (one epoch, one update per rollout), with neither clipping nor a KL penalty. The loss is the mean over all tokens; its
    gradient has the direction of the paper's, which sums over each response's tokens.
    """

    name = "opo"
    Config = configs.OpoPresetConfig


class GpgPreset(_Published):
    """GPG (arXiv 2504.02546): the plain policy gradient with rewards relative to their group's mean.

    Advantages are scaled up to make up for groups without a gradient, the loss is the mean over all tokens, and there is neither clipping
    nor a KL penalty.
    """

    name = "gpg"
    Config = configs.GpgPresetConfig


class GmpoPreset(_Published):
    """GMPO (arXiv 2507.20673): the geometric mean of a response's token ratios, each clipped to e^±0.4.

    Uses GRPO's advantages and the mean over responses, without a KL penalty.
    """

    name = "gmpo"
    Config = configs.GmpoPresetConfig
