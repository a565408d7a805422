"""The fused output layer on the CPU, with plain functions in place of the kernels: results are the same with kept logits, which only
save work, and with a vocabulary that is divided among ranks."""

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import attrs
import pytest
import torch

from dovetail_torch_engines import Vocabulary, fused_head

R, H, V, K = 19, 8, 50, 5
TOP = 20
"""Number of most likely words: more than a rank's third of the vocabulary has."""
CHUNK = 6
"""Rows of a chunk; the last of four chunks is not full."""
A_CHUNK = CHUNK * V * 4


def scaled(logits_CV, bias_V, temperature_C):
    biased_CV = logits_CV.float() if bias_V is None else logits_CV.float() + bias_V
    return biased_CV if temperature_C is None else biased_CV / temperature_C[:, None]


def row_scores(logits_CV, bias_V, targets_C, temperature_C, *, entropies, squares):
    """As `head_kernels.row_scores`."""
    z_CV = scaled(logits_CV, bias_V, temperature_C)
    log_pi_CV = z_CV.log_softmax(-1)
    pi_CV = log_pi_CV.exp()
    chosen_C = log_pi_CV.gather(-1, targets_C[:, None])[:, 0]
    return chosen_C, -(pi_CV * log_pi_CV).sum(-1), pi_CV.square().sum(-1), z_CV.logsumexp(-1)


def into_gradient(
    logits_CV, bias_V, targets_C, temperature_C, lse_C, grad_C, entropies_C, grad_entropies_C
):
    """As `head_kernels.into_gradient`: in place."""
    log_pi_CV = scaled(logits_CV, bias_V, temperature_C) - lse_C[:, None]
    pi_CV = log_pi_CV.exp()
    grad_CV = -grad_C[:, None] * pi_CV
    here = targets_C >= 0
    grad_CV[torch.arange(len(targets_C))[here], targets_C[here]] += grad_C[here]
    if grad_entropies_C is not None:
        grad_CV -= grad_entropies_C[:, None] * pi_CV * (log_pi_CV + entropies_C[:, None])
    if temperature_C is not None:
        grad_CV /= temperature_C[:, None]
    logits_CV.copy_(grad_CV)


@pytest.fixture
def products(monkeypatch):
    """Small chunks and plain kernels; how many products [rows, V] were made."""
    kernels = types.ModuleType("dovetail_torch_engines.head_kernels")
    kernels.row_scores, kernels.into_gradient = row_scores, into_gradient
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(fused_head, "CHUNK_ROWS_AT_LEAST", CHUNK)
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", 1)
    monkeypatch.setattr(fused_head, "ROW_MULTIPLE", 2)
    made, plain = [], torch.mm

    def counted(one, other, **out):
        if other.shape == (H, V):
            made.append(len(one))
        return plain(one, other, **out)

    monkeypatch.setattr(torch, "mm", counted)
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize(("room", "kept"), [(0, 0), (A_CHUNK, 1), (2 * A_CHUNK + 7, 2), (10**9, 4)])
def test_kept_logits_give_the_same_gradients_for_less_work(products, room, kept, bias, temperature):
    torch.manual_seed(0)
    leaves = [torch.randn(R, H, requires_grad=True), torch.randn(V, H, requires_grad=True)]
    bias_V = torch.randn(V, requires_grad=True) if bias else None
    leaves += [bias_V] if bias else []
    targets_R, weights_R = torch.randint(0, V, (R,)), torch.linspace(-1, 1, R)
    temperature_R = torch.rand(R) + 0.5 if temperature else None

    log_pi_RV = scaled(leaves[0] @ leaves[1].t(), bias_V, temperature_R).log_softmax(-1)
    chosen_R = log_pi_RV.gather(-1, targets_R[:, None])[:, 0]
    goal = (chosen_R * weights_R).sum() - (log_pi_RV.exp() * log_pi_RV).sum()
    expected = torch.autograd.grad(goal, leaves)

    products.clear()
    scores = fused_head.fused_scores(
        leaves[0], leaves[1], bias_V, targets_R, temperature_R,
        outputs=frozenset({"log_probs", "entropies"}), dtype=torch.float32, room=room,
    )  # fmt: skip
    total = (scores["log_probs"] * weights_R).sum() + scores["entropies"].sum()
    assert len(products) == 4
    once = torch.autograd.grad(total, leaves, retain_graph=True)
    assert len(products) == 4 + (4 - kept)
    for mine, theirs in zip(once, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    # Kept logits were overwritten with their gradient: a second backward pass recomputes all of them.
    again = torch.autograd.grad(total, leaves)
    assert len(products) == 4 + (4 - kept) + 4
    for mine, theirs in zip(again, once, strict=True):
        torch.testing.assert_close(mine, theirs)


@attrs.frozen(kw_only=True, eq=False)
class Part(Vocabulary):
    """One of some ranks that are threads: what they reduce, they leave on a table."""

    rank: int
    table: list[Any]
    barrier: Barrier

    def maximum(self, values):
        return values.copy_(self._all(values).amax(0))

    def total(self, values):
        return values.copy_(self._all(values).sum(0))

    def gathered(self, values):
        return self._all(values)

    def _all(self, values):
        self.table[self.rank] = values.clone()
        self.barrier.wait(120)
        everyones = torch.stack(self.table)
        self.barrier.wait(120)
        return everyones


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "upstream",
    [
        ("log_probs",), ("entropies",), ("log_probs", "entropies"), ("log_probs_at",),
        ("log_probs", "entropies", "log_probs_at"),
    ],
)  # fmt: skip
def test_a_divided_vocabulary_gives_the_scores_and_gradients_of_the_whole(
    products, ranks, upstream
):
    torch.manual_seed(0)
    hidden_RH, weight_VH = torch.randn(R, H) * 3, torch.randn(V, H)
    targets_R, temperature_R = torch.randint(0, V, (R,)), torch.rand(R) + 0.5
    # Words in every rank's shard, and some rows with the target itself.
    ids_RK = torch.stack([torch.randperm(V)[:K] for _ in range(R)])
    ids_RK[::3, 1] = targets_R[::3]
    given = {name: torch.linspace(-1, 1, R) + k for k, name in enumerate(upstream)}
    if "log_probs_at" in given:
        given["log_probs_at"] = torch.randn(R, K)

    leaves = [hidden_RH.clone().requires_grad_(), weight_VH.clone().requires_grad_()]
    log_pi_RV = scaled(leaves[0] @ leaves[1].t(), None, temperature_R).log_softmax(-1)
    pi_RV = log_pi_RV.exp()
    expected = {
        "log_probs": log_pi_RV.gather(-1, targets_R[:, None])[:, 0],
        "entropies": -(pi_RV * log_pi_RV).sum(-1),
        "sum_pi_squared": pi_RV.square().sum(-1),
        "log_probs_at": log_pi_RV.gather(-1, ids_RK),
        "top_log_probs": log_pi_RV.topk(TOP).values,
        "top_ids": log_pi_RV.topk(TOP).indices.int(),
    }
    sum((expected[name] * given[name]).sum() for name in upstream).backward()

    own = -(-V // ranks)
    padded_VH = torch.cat([weight_VH, torch.full((own * ranks - V, H), 9.0)])
    table, barrier = [None] * ranks, Barrier(ranks)

    def on(rank):
        vocabulary = Part(
            first=own * rank, size=min(own, V - own * rank), group=None if ranks == 1 else object(),
            rank=rank, table=table, barrier=barrier,
        )  # fmt: skip
        mine = [
            hidden_RH.clone().requires_grad_(),
            padded_VH[own * rank : own * (rank + 1)].clone().requires_grad_(),
        ]
        scores = fused_head.fused_scores(
            *mine, None, targets_R, temperature_R,
            outputs=frozenset(expected), dtype=torch.float32, vocabulary=vocabulary,
            ids_RK=ids_RK, top_k=TOP,
        )  # fmt: skip
        sum((scores[name] * given[name]).sum() for name in upstream).backward()
        return scores, *(leaf.grad for leaf in mine)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(on, range(ranks)))
    for scores, _, _ in found:
        for name, values in expected.items():
            torch.testing.assert_close(scores[name], values, rtol=1e-4, atol=1e-5)
    grad_hidden_RH = sum(grad for _, grad, _ in found)
    grad_padded_VH = torch.cat([grad for _, _, grad in found])
    torch.testing.assert_close(grad_hidden_RH, leaves[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_padded_VH[:V], leaves[1].grad, rtol=1e-4, atol=1e-5)
    assert not grad_padded_VH[V:].any()
