"""The output layer over a divided vocabulary, without kernels: scores and gradients equal those of the whole vocabulary in float64.

Legend: R tokens, H hidden size, V vocabulary, K words for each token.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import attrs
import pytest
import torch

from dovetail_torch_engines import Vocabulary
from dovetail_train_megatron.head import score_tokens

R, H, V, K, TOP = 11, 8, 50, 4, 20


@attrs.frozen(kw_only=True, eq=False)
class Part(Vocabulary):
    """One of some ranks that are threads: what they exchange, they leave on a table."""

    rank: int
    table: list[Any]
    barrier: Barrier

    def maximum(self, values):
        return values.copy_(self.gathered(values).amax(0))

    def total(self, values):
        return values.copy_(self.gathered(values).sum(0))

    def gathered(self, values):
        self.table[self.rank] = values.clone()
        self.barrier.wait(120)
        everyones = torch.stack(self.table)
        self.barrier.wait(120)
        return everyones


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "upstream", [("log_probs_at",), ("log_probs", "entropies", "log_probs_at")]
)
def test_words_of_a_divided_vocabulary_have_the_scores_and_gradients_of_the_whole(ranks, upstream):
    torch.manual_seed(0)
    hidden_RH, weight_VH = torch.randn(R, H), torch.randn(V, H)
    targets_R, temperature_R = torch.randint(0, V, (R,)), torch.rand(R) + 0.5
    ids_RK = torch.stack([torch.randperm(V)[:K] for _ in range(R)])
    ids_RK[::2, 1] = targets_R[::2]
    shapes = {"log_probs": (R,), "entropies": (R,), "log_probs_at": (R, K)}
    given = {name: torch.randn(shapes[name]) for name in upstream}

    leaves = [x.double().requires_grad_() for x in (hidden_RH, weight_VH)]
    log_pi_RV = (leaves[0] @ leaves[1].t() / temperature_R[:, None]).log_softmax(-1)
    top = log_pi_RV.topk(TOP)
    expected = {
        "log_probs": log_pi_RV.gather(-1, targets_R[:, None])[:, 0],
        "entropies": -(log_pi_RV.exp() * log_pi_RV).sum(-1),
        "sum_pi_squared": log_pi_RV.exp().square().sum(-1),
        "log_probs_at": log_pi_RV.gather(-1, ids_RK),
        "top_log_probs": top.values,
        "top_ids": top.indices.double(),
    }
    sum((expected[name] * given[name]).sum() for name in upstream).backward()

    own = -(-V // ranks)
    padded_VH = torch.cat([weight_VH, torch.zeros(own * ranks - V, H)])
    table, barrier = [None] * ranks, Barrier(ranks)

    def on(rank):
        part = Part(
            first=own * rank, size=min(own, V - own * rank), group=None if ranks == 1 else object(),
            rank=rank, table=table, barrier=barrier,
        )  # fmt: skip
        mine = [
            hidden_RH.clone().requires_grad_(),
            padded_VH[own * rank : own * (rank + 1)].clone().requires_grad_(),
        ]
        scores = score_tokens(
            *mine, targets_R, temperature_R, part,
            outputs=frozenset(expected), chunk=3, ids_RK=ids_RK, top_k=TOP,
        )  # fmt: skip
        sum((scores[name] * given[name]).sum() for name in upstream).backward()
        return scores, *(leaf.grad for leaf in mine)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(on, range(ranks)))
    for scores, _, _ in found:
        for name, values in expected.items():
            torch.testing.assert_close(scores[name].double(), values, rtol=1e-4, atol=1e-5)
    grad_hidden_RH = sum(grad for _, grad, _ in found).double()
    grad_weight_VH = torch.cat([grad for _, _, grad in found])[:V].double()
    torch.testing.assert_close(grad_hidden_RH, leaves[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_weight_VH, leaves[1].grad, rtol=1e-4, atol=1e-5)
