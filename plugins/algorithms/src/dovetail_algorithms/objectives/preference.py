"""Objectives of preference pairs: DPO, IPO, SimPO, CPO and ORPO.

Each objective computes an implicit reward r of every response, and minimises a loss of the two rewards of every pair:

    L = 1/P Σ_p ℓ(r_w, r_l) + c/T_w Σ_t∈w −log π(y_t | x, y_<t)

where w is a pair's chosen response, l its rejected response. The second term, the negative log-likelihood of the chosen responses, has a
weight c, which is 0 unless stated. Legend: N = 2P samples, P pairs, T response tokens, packed end to end, T_w of them in chosen
responses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import attrs
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import OUTPUTS, Objective, ObjectiveTerm, OutputSpec, Reduction
from dovetail.metrics import Metric
from dovetail.sections import PluginSection
from dovetail_algorithms.config.objectives import (
    CpoConfig,
    DpoConfig,
    IpoConfig,
    OrpoConfig,
    SimpoConfig,
)
from dovetail_algorithms.objectives.pair_losses import F_DIVERGENCES, PAIR_LOSSES, logistic
from dovetail_stages import (
    all_finite,
    loss_share,
    mean_metric,
    on_device,
    pair_rows,
    sum_by_sample,
    token_column,
)


@attrs.frozen(kw_only=True, eq=False)
class Responses:
    """The summed log-probabilities and the lengths of N responses, for their implicit rewards. Tokens with mask 0 don't count."""

    log_probs_N: Float[Tensor, "N"]
    """Σ_t log π(y_t | x, y_<t), in nats; carries the gradient."""
    log_ratios_N: Float[Tensor, "N"]
    """Σ_t log π(y_t | x, y_<t) − log π_ref(y_t | x, y_<t); equal to `log_probs_N` if the objective has no reference policy."""
    lengths_N: Float[Tensor, "N"]
    """The number of tokens of each response, at least 1."""


class PreferenceObjective(Objective):
    """Base of objectives on preference pairs. A subclass defines a response's reward and a pair's loss."""

    unit = "pair"
    key_figures = {"loss": "down", "accuracy": "up", "margin": "up"}  # noqa: RUF012
    reference: ClassVar[bool] = True
    """Whether rewards are relative to a reference policy."""

    @classmethod
    def outputs(cls, config: PluginSection) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["log_probs"],)

    @classmethod
    def requires(cls, config: PluginSection) -> frozenset[str]:
        """Return `response_mask`, `chosen`, and `ref_log_probs` if rewards are relative to a reference."""
        columns = frozenset({"response_mask", "chosen"})
        return columns | {"ref_log_probs"} if cls.reference else columns

    @abstractmethod
    def rewards(self, responses: Responses) -> Float[Tensor, "N"]:
        """Return the implicit reward of each response."""

    @abstractmethod
    def losses(
        self, chosen_P: Float[Tensor, "P"], rejected_P: Float[Tensor, "P"]
    ) -> Float[Tensor, "P"]:
        """Return each pair's loss, from the rewards of its two responses."""

    @property
    def nll_coef(self) -> float:
        """Weight of the negative log-likelihood of the chosen responses."""
        return 0.0

    @property
    def tail_weight(self) -> float:
        """The weight of log-ratios in the tail of a response: the tokens beyond the length of the pair's other response."""
        return 1.0

    def _weights(self, batch: Batch, mask_T: Bool[Tensor, "T"]) -> Float[Tensor, "T"]:
        mask: Ragged = batch["response_mask"]
        lengths_N = mask.sum().astype(np.int64)
        shorter_N, rows = lengths_N.copy(), pair_rows(batch)
        for own, other in (rows, rows[::-1]):
            shorter_N[own] = np.minimum(lengths_N[own], lengths_N[other])
        counted_T = np.cumsum(mask.values)
        before_N = np.concatenate([[0], counted_T])[mask.offsets[:-1]]
        place_T = counted_T - np.repeat(before_N, mask.lengths)
        tail_T = on_device(place_T > np.repeat(shorter_N, mask.lengths), mask_T)
        return torch.where(tail_T, self.tail_weight, 1.0)

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        """Check the mini-batch and return it unchanged.

        Raises:
            ColumnError: a pair does not have one chosen and one rejected response.
        """
        pair_rows(mini_batch)
        return mini_batch

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        """Return the number of `pairs`, and of `tokens` in the chosen responses."""
        chosen_N = np.asarray(mini_batch["chosen"], np.bool_)
        tokens = mini_batch["response_mask"].sum()[chosen_N].sum()
        summed = reduction.sum(np.array([len(mini_batch) / 2, tokens], np.float64)).tolist()
        return dict(zip(("pairs", "tokens"), summed, strict=True))

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """Compute the loss term (see `Objective.term`). Metrics, means over pairs: `actor/loss`; `actor/accuracy`, the share whose chosen
        response has the higher reward, with ties as half; `actor/margin`, the reward difference of chosen and rejected;
        `actor/chosen_reward`, `actor/rejected_reward`; and `actor/chosen_log_prob`, `actor/rejected_log_prob`, the log-probability of a
        whole response in nats.
        """
        mask: Ragged = micro_batch["response_mask"]
        mask_T = on_device(mask.values, outputs["log_probs"]).bool()
        log_probs_T = outputs["log_probs"].masked_fill(~mask_T, 0)
        offsets = on_device(mask.offsets, log_probs_T)
        log_probs_N = log_ratios_N = sum_by_sample(log_probs_T, offsets)
        if self.reference:
            reference_T = token_column(micro_batch, "ref_log_probs", mask, mask_T, log_probs_T)
            ratios_T = log_probs_T - reference_T
            if self.tail_weight != 1:
                ratios_T = ratios_T * self._weights(micro_batch, mask_T)
            log_ratios_N = sum_by_sample(ratios_T, offsets)
        lengths_N = sum_by_sample(mask_T.to(log_probs_N.dtype), offsets).clamp(min=1)
        rewards_N = self.rewards(
            Responses(log_probs_N=log_probs_N, log_ratios_N=log_ratios_N, lengths_N=lengths_N)
        )
        rows = [on_device(rows_P, log_probs_N) for rows_P in pair_rows(micro_batch)]
        (chosen_P, rejected_P), (chosen_log_P, rejected_log_P) = (
            [values_N[rows_P] for rows_P in rows] for values_N in (rewards_N, log_probs_N)
        )
        pairs = denominators["pairs"] or 1.0
        loss = self.losses(chosen_P, rejected_P).sum() / pairs
        if self.nll_coef:
            loss = loss - self.nll_coef * chosen_log_P.sum() / (denominators["tokens"] or 1.0)
        every_P = torch.ones_like(chosen_P, dtype=torch.bool)
        means = {
            "accuracy": share_preferred(chosen_P - rejected_P),
            "margin": chosen_P - rejected_P,
            "chosen_reward": chosen_P,
            "rejected_reward": rejected_P,
            "chosen_log_prob": chosen_log_P,
            "rejected_log_prob": rejected_log_P,
        }
        metrics: dict[str, Metric] = {
            "actor/loss": loss_share(loss, len(chosen_P) / pairs),
            **{f"actor/{name}": mean_metric(values_P, every_P) for name, values_P in means.items()},
        }
        return ObjectiveTerm(
            loss=loss, metrics=metrics, finite=all_finite(loss, {"log_probs": log_probs_T})
        )


class Dpo(PreferenceObjective):
    """Direct preference optimization, and other losses of rewards that the policy implies: β g(u), u = Σ_t log π(y_t) − log π_ref(y_t).

    With w = β g(u_w) of a pair's chosen response and l = β g(u_l) of the rejected one, `loss` is

        logistic    −(1 − ε) log σ(w − l) − ε log σ(l − w)                                  DPO (arXiv 2305.18290, equation 7)
          robust    (−(1 − ε) log σ(w − l) + ε log σ(l − w)) / (1 − 2ε)                     (arXiv 2403.00409, equation 12)
        hinge       max(0, 1 − (w − l))                                                     SLiC (arXiv 2305.10425; 2309.06657)
        exo         q log q/(1 − ε) + (1 − q) log (1 − q)/ε,  q = σ(w − l)                  EXO (arXiv 2402.00856, equation 16)
        nca         −log σ(w) − ½ log σ(−w) − ½ log σ(−l)                                   NCA (arXiv 2402.05369)
        bco         −log σ(w) − log σ(−l)                                                   BCO, no shift (arXiv 2404.04656)
        apo_zero    1 − σ(w) + σ(l)                                                         APO (arXiv 2408.06266, equation 7)
        apo_down    σ(w) + 1 − σ(w − l)                                                     APO (the same, equation 8)
        sppo_hard   (u_w − 1/(2β))² + (u_l + 1/(2β))²                                       SPPO (arXiv 2405.00675, equation 4.7)
        discopop    (1 − s) (−log σ(m)) + s exp(−m),  m = w − l,  s = σ(m/τ)                DiscoPOP (arXiv 2406.08414, equation 5)

    In `logistic`, ε > 0 assumes that this share of the pairs has swapped labels (conservative DPO, Mitchell, 2023); `robust` corrects for
    it without bias. g(u) = u belongs to the reverse KL to the reference; `f_divergence` selects others (arXiv 2309.16240): `forward_kl` 1
    − exp(−u), `js` log 2 + log σ(u), `alpha` (exp((α − 1) u) − 1)/(α − 1). `ld_alpha` is the weight, in u, of a response's tokens beyond
    the length of the pair's other one (LD-DPO, arXiv 2409.06411).
    """

    name = "dpo"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = DpoConfig
    config: DpoConfig

    def rewards(self, responses: Responses) -> Float[Tensor, "N"]:
        ahead_N = F_DIVERGENCES[self.config.f_divergence](responses.log_ratios_N, self.config)
        return self.config.beta * ahead_N

    def losses(
        self, chosen_P: Float[Tensor, "P"], rejected_P: Float[Tensor, "P"]
    ) -> Float[Tensor, "P"]:
        return PAIR_LOSSES[self.config.loss](chosen_P, rejected_P, self.config)

    @property
    def nll_coef(self) -> float:
        return self.config.nll_coef

    @property
    def tail_weight(self) -> float:
        return self.config.ld_alpha


class Ipo(PreferenceObjective):
    """Identity preference optimization: draws the margin to a target, so that unanimous preferences don't drive it to infinity.

        r = 1/|y| Σ_t (log π(y_t) − log π_ref(y_t))        ℓ = (r_w − r_l − 1/(2β))²

    (arXiv 2310.12036, equation 17, where β is called τ). Log-ratios are averaged over a response's tokens, as the authors computed them.
    """

    name = "ipo"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = IpoConfig
    config: IpoConfig

    def rewards(self, responses: Responses) -> Float[Tensor, "N"]:
        return responses.log_ratios_N / responses.lengths_N

    def losses(
        self, chosen_P: Float[Tensor, "P"], rejected_P: Float[Tensor, "P"]
    ) -> Float[Tensor, "P"]:
        return (chosen_P - rejected_P - 1 / (2 * self.config.beta)) ** 2


class Simpo(PreferenceObjective):
    """Simple preference optimization: the mean log-probability as reward, without a reference, and a target margin.

        r = β/|y| Σ_t log π(y_t)        ℓ = −log σ(r_w − r_l − γ)

    (arXiv 2405.14734, equation 6).
    """

    name = "simpo"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = SimpoConfig
    config: SimpoConfig
    reference = False

    def rewards(self, responses: Responses) -> Float[Tensor, "N"]:
        return self.config.beta * responses.log_probs_N / responses.lengths_N

    def losses(
        self, chosen_P: Float[Tensor, "P"], rejected_P: Float[Tensor, "P"]
    ) -> Float[Tensor, "P"]:
        return logistic(chosen_P - rejected_P - self.config.gamma)


class Cpo(PreferenceObjective):
    """Contrastive preference optimization: the log-probability as reward, without a reference, plus the likelihood of the chosen
    responses.

        r = β Σ_t log π(y_t)        ℓ = −log σ(r_w − r_l),  or max(0, 1 − (r_w − r_l)) with `loss: hinge`

    (arXiv 2401.08417, equations 3 to 5). The negative log-likelihood has weight `nll_coef`.
    """

    name = "cpo"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = CpoConfig
    config: CpoConfig
    reference = False

    def rewards(self, responses: Responses) -> Float[Tensor, "N"]:
        return self.config.beta * responses.log_probs_N

    def losses(
        self, chosen_P: Float[Tensor, "P"], rejected_P: Float[Tensor, "P"]
    ) -> Float[Tensor, "P"]:
        margins_P = chosen_P - rejected_P
        return logistic(margins_P) if self.config.loss == "logistic" else torch.relu(1 - margins_P)

    @property
    def nll_coef(self) -> float:
        return self.config.nll_coef


class Orpo(PreferenceObjective):
    """Odds ratio preference optimization: fine-tuning on the chosen responses, with the log odds ratio as a penalty.

        r = log p/(1 − p),  p = exp(1/|y| Σ_t log π(y_t))        ℓ = −β log σ(r_w − r_l)

    (arXiv 2403.07691, equations 6 and 7, where β is called λ). The negative log-likelihood has weight 1.
    """

    name = "orpo"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = OrpoConfig
    config: OrpoConfig
    reference = False

    def rewards(self, responses: Responses) -> Float[Tensor, "N"]:
        mean_N = responses.log_probs_N / responses.lengths_N
        # The clamp keeps log(1 − p) finite if p is 1 in float32.
        return mean_N - torch.log(-torch.expm1(mean_N.clamp(max=-1e-7)))

    def losses(
        self, chosen_P: Float[Tensor, "P"], rejected_P: Float[Tensor, "P"]
    ) -> Float[Tensor, "P"]:
        return self.config.beta * logistic(chosen_P - rejected_P)

    @property
    def nll_coef(self) -> float:
        return 1.0


def share_preferred(margins_P: Float[Tensor, "P"]) -> Float[Tensor, "P"]:
    """Return 1 for each pair with a positive margin, 0.5 for a margin of 0, and 0 for a negative one, without gradient; float [P].

    The mean is the share of pairs whose chosen response has the higher reward. `margins_P` are the reward differences.
    """
    return (margins_P.detach().sign() + 1) / 2
