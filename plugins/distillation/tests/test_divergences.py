"""Divergences over the teacher's words against their definition in float64. Legend: T tokens, K words, V vocabulary."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dovetail_distillation.conformance import plain_divergence
from dovetail_distillation.divergences import DIVERGENCES, TAIL_FLOOR, divergence, events


def log_pi(rng, tokens, vocabulary, spread):
    logits = rng.normal(size=(tokens, vocabulary)) * spread
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def found(name, tail, beta, teacher_TK, student_TK):
    both = (events(torch.from_numpy(x), tail) for x in (teacher_TK, student_TK))
    return divergence(name, *both, beta=beta).numpy()


cases = given(
    st.sampled_from(DIVERGENCES),
    st.sampled_from(["bucket", "renormalize"]),
    st.floats(0.05, 0.95),
    st.integers(2, 9),
    st.floats(0.1, 3),
    st.integers(0, 2**32 - 1),
)


@cases
def test_each_is_its_definition(name, tail, beta, words, spread, seed):
    rng = np.random.default_rng(seed)
    teacher_TK, student_TK = (log_pi(rng, 5, 12, spread)[:, :words] for _ in range(2))
    expected = plain_divergence(name, tail, beta, teacher_TK, student_TK)
    np.testing.assert_allclose(
        found(name, tail, beta, teacher_TK, student_TK), expected, rtol=1e-4, atol=1e-5
    )


@cases
def test_no_bucket_makes_it_larger_than_that_of_all_words(name, tail, beta, words, spread, seed):
    rng = np.random.default_rng(seed)
    teacher_TV, student_TV = (log_pi(rng, 5, 12, spread) for _ in range(2))
    of_all = found(name, "renormalize", beta, teacher_TV, student_TV)
    of_some = found(name, "bucket", beta, teacher_TV[:, :words], student_TV[:, :words])
    assert (of_some <= of_all + 1e-5).all()
    assert (of_some >= -1e-6).all()
    # If all words are compared, the bucket has no probability and no effect.
    whole = found(name, "bucket", beta, teacher_TV, student_TV)
    np.testing.assert_allclose(whole, of_all, atol=20 * TAIL_FLOOR)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_words_that_have_all_the_probability_keep_loss_and_gradient_finite(name, tail):
    teacher_TK = torch.tensor([[0.0, -30.0], [-1e4, -1e4], [-0.5, -1.0]])
    student_TK = torch.tensor([[-40.0, 0.0], [0.0, -50.0], [-0.5, -1.0]], requires_grad=True)
    divergences_T = divergence(name, events(teacher_TK, tail), events(student_TK, tail))
    divergences_T.sum().backward()
    assert torch.isfinite(divergences_T).all()
    assert torch.isfinite(student_TK.grad).all()
    assert divergences_T[2].item() == pytest.approx(0, abs=1e-6)


def test_the_student_of_its_teacher_has_nothing_to_learn():
    rng = np.random.default_rng(0)
    log_pi_TK = torch.from_numpy(log_pi(rng, 4, 9, 1.0)[:, :3])
    for name in DIVERGENCES:
        student_TK = log_pi_TK.clone().requires_grad_()
        both = events(log_pi_TK, "bucket"), events(student_TK, "bucket")
        divergences_T = divergence(name, *both)
        divergences_T.sum().backward()
        torch.testing.assert_close(divergences_T.detach(), torch.zeros(4, dtype=torch.float64))
        torch.testing.assert_close(student_TK.grad, torch.zeros_like(log_pi_TK))
