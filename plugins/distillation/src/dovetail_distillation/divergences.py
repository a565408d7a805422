"""Divergences between a teacher P and a student Q at each token, from the teacher's K most likely words (vocabulary tokens).

    forward_kl   Σ P log (P / Q)
    reverse_kl   Σ Q log (Q / P)
    jsd          β Σ P log (P / M) + (1 − β) Σ Q log (Q / M),  M = β P + (1 − β) Q

(Hinton et al., arXiv 1503.02531; Gu et al., MiniLLM, arXiv 2306.08543; Agarwal et al., GKD, arXiv 2306.13649, equation 1.) The sums are
over the K words and, with the tail as a bucket, over one more word with the remaining probability. The result is then at most the
divergence over the whole vocabulary of V words, and equals it if K = V. Without the bucket, both distributions are normalised over the
K words, and Q's probability of other words is ignored.

Legend: T tokens, K words, J = K or K + 1.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

TAIL_FLOOR = 1e-6
"""Floor of the bucket's probability, below which it is lost in float32 rounding; at the floor the bucket has no gradient."""

DIVERGENCES = ("forward_kl", "jsd", "reverse_kl")
"""The divergences that compare the teacher's most likely words."""


def events(
    log_probs_TK: Float[Tensor, "T K"], tail: Literal["bucket", "renormalize"]
) -> Float[Tensor, "T J"]:
    """Return the log-probabilities of the K words as a complete distribution: with a bucket for all other words (J = K + 1), or normalised.

    Args:
        log_probs_TK: log-probabilities of the K words, float32, nats; may carry the gradient.
        tail: the treatment of all other words.
    """
    if tail == "renormalize":
        return log_probs_TK.log_softmax(-1)
    rest_T = 1 - log_probs_TK.exp().sum(-1)
    return torch.cat([log_probs_TK, rest_T.clamp(min=TAIL_FLOOR).log()[:, None]], dim=-1)


def divergence(
    name: str,
    teacher_TJ: Float[Tensor, "T J"],
    student_TJ: Float[Tensor, "T J"],
    *,
    beta: float = 0.5,
) -> Float[Tensor, "T"]:
    """Return the divergence of each token, float32, nats.

    Args:
        name: a name of `DIVERGENCES`.
        teacher_TJ: the teacher's log-probabilities, log P, from `events`.
        student_TJ: the student's log-probabilities, log Q, of the same words.
        beta: the mixture weight of `jsd`.
    """
    if name == "forward_kl":
        return _kl(teacher_TJ, student_TJ)
    if name == "reverse_kl":
        return _kl(student_TJ, teacher_TJ)
    mixture_TJ = torch.logaddexp(teacher_TJ + math.log(beta), student_TJ + math.log1p(-beta))
    return beta * _kl(teacher_TJ, mixture_TJ) + (1 - beta) * _kl(student_TJ, mixture_TJ)


def _kl(one_TJ: Float[Tensor, "T J"], other_TJ: Float[Tensor, "T J"]) -> Float[Tensor, "T"]:
    return (one_TJ.exp() * (one_TJ - other_TJ)).sum(-1)
