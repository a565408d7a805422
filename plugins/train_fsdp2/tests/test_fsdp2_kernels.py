"""The output layer's kernels against the plain formula in float64. With triton installed, `TRITON_INTERPRET=1` runs the kernels on a CPU."""

import os

import pytest
import torch

from dovetail_torch_engines import fused_head
from dovetail_train_fsdp2 import head

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]  # fmt: skip

R, H = (9, 16) if INTERPRETED else (300, 64)
V = 150 if INTERPRETED else 20_011
NAMES = ("log_probs", "entropies", "sum_pi_squared")
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several chunks, and several blocks a row, the last of them not full."""
    from dovetail_torch_engines import head_kernels

    monkeypatch.setattr(fused_head, "CHUNK_ROWS_AT_LEAST", max(4, R // 3))
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", 1)
    monkeypatch.setattr(fused_head, "ROW_MULTIPLE", 4)
    monkeypatch.setattr(fused_head, "fuses", lambda _: True)
    monkeypatch.setattr(head, "fuses", lambda _: True)
    if INTERPRETED:
        monkeypatch.setattr(head_kernels, "BLOCK", 64)


def random_case(dtype, *, bias, temperature):
    """Hidden states, weights and bias as `dtype` holds them; targets and temperatures."""
    torch.manual_seed(0)
    leaves = [torch.randn(R, H).to(dtype), (torch.randn(V, H) * 0.5).to(dtype)]
    leaves.append(torch.randn(V) if bias else None)
    temperature_R = torch.rand(R) + 0.5 if temperature else None
    return leaves, torch.randint(0, V, (R,)), temperature_R


def scored(leaves, score, upstream, dtype):
    """Scores and gradients, in float64 on the CPU."""
    given = {name: torch.linspace(-1, 1, R, dtype=torch.float64) + k for k, name in enumerate(upstream)}  # fmt: skip
    own = [x if x is None else x.clone().to(DEVICE, dtype).requires_grad_() for x in leaves]
    if own[2] is not None and dtype == torch.bfloat16:
        own[2] = leaves[2].clone().to(DEVICE).requires_grad_()
    scores = score(*own)
    total = sum((scores[name].double() * given[name].to(DEVICE)).sum() for name in upstream)
    total.backward()
    grads = [x.grad.double().cpu() for x in own if x is not None]
    return {name: x.detach().double().cpu() for name, x in scores.items()}, grads


def whole(targets_R, temperature_R):
    """The plain formula."""

    def score(hidden, weight, bias):
        z = hidden @ weight.t() + (0 if bias is None else bias)
        if temperature_R is not None:
            z = z / temperature_R.to(DEVICE)[:, None]
        log_pi = z.log_softmax(-1)
        pi = log_pi.exp()
        return {
            "log_probs": log_pi[torch.arange(R, device=DEVICE), targets_R.to(DEVICE)],
            "entropies": -(pi * log_pi).sum(-1),
            "sum_pi_squared": pi.square().sum(-1),
        }

    return score


def fused(targets_R, temperature_R, dtype, outputs=NAMES, room=0):
    def score(hidden, weight, bias):
        return head.score_tokens(
            hidden, weight, bias, targets_R.to(DEVICE),
            None if temperature_R is None else temperature_R.to(DEVICE),
            outputs=frozenset(outputs), dtype=dtype, room=room,
        )  # fmt: skip

    return score


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("upstream", [("log_probs",), ("entropies",), ("log_probs", "entropies")])
def test_the_kernels_are_the_plain_formula(dtype, bias, temperature, upstream):
    leaves, targets_R, temperature_R = random_case(dtype, bias=bias, temperature=temperature)
    scores, grads = scored(leaves, fused(targets_R, temperature_R, dtype), upstream, dtype)
    of_whole = whole(targets_R, temperature_R)
    expected, expected_grads = scored(leaves, of_whole, upstream, torch.float64)
    tolerance = TOLERANCES[dtype]
    for name in NAMES:
        worst = (scores[name] - expected[name]).abs().max()
        # bfloat16 rounds each logit to 3 digits, and a log-probability has the error of its logit.
        assert worst <= tolerance * expected["log_probs"].abs().max(), name
    for grad, exact in zip(grads, expected_grads, strict=True):
        assert (grad - exact).norm() <= tolerance * exact.norm()


def test_without_a_gradient_the_scores_are_the_same():
    leaves, targets_R, temperature_R = random_case(torch.float32, bias=True, temperature=True)
    with_gradient, _ = scored(leaves, fused(targets_R, temperature_R, torch.float32), NAMES[:1], torch.float32)  # fmt: skip
    with torch.no_grad():
        without = fused(targets_R, temperature_R, torch.float32)(*(x.to(DEVICE) for x in leaves))
    for name in NAMES:
        assert torch.equal(without[name].double().cpu(), with_gradient[name])


def test_a_frozen_output_layer_gets_no_gradient():
    leaves, targets_R, _ = random_case(torch.float32, bias=False, temperature=False)
    hidden, weight = leaves[0].to(DEVICE).requires_grad_(), leaves[1].to(DEVICE)
    scores = fused(targets_R, None, torch.float32, ("log_probs",))(hidden, weight, None)
    scores["log_probs"].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_a_second_backward_pass_gives_the_same():
    leaves, targets_R, _ = random_case(torch.float32, bias=False, temperature=False)
    hidden = leaves[0].to(DEVICE).requires_grad_()
    score = fused(targets_R, None, torch.float32, ("log_probs",), room=2**40)(
        hidden, leaves[1].to(DEVICE), None
    )
    total = score["log_probs"].sum()
    (first,) = torch.autograd.grad(total, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(total, hidden)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("chunks", [1, 2, 99])
def test_logits_that_are_kept_give_the_same(chunks):
    leaves, targets_R, temperature_R = random_case(torch.float32, bias=True, temperature=True)
    upstream = ("log_probs", "entropies")
    room = chunks * fused_head.chunk_rows(R, V, torch.float32) * V * torch.float32.itemsize
    kept = fused(targets_R, temperature_R, torch.float32, room=room)
    found = scored(leaves, kept, upstream, torch.float32)
    expected = scored(
        leaves, fused(targets_R, temperature_R, torch.float32), upstream, torch.float32
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_in_its_row(value):
    leaves, targets_R, _ = random_case(torch.float32, bias=False, temperature=False)
    leaves[0][1, 0] = value
    scores = fused(targets_R, None, torch.float32)(leaves[0].to(DEVICE), leaves[1].to(DEVICE), None)
    for name in NAMES:
        assert torch.isfinite(scores[name]).tolist() == [row != 1 for row in range(R)]


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], device=DEVICE, requires_grad=True)
    scores = head.score_tokens(
        hidden, torch.tensor([[1.0], [-1.0]], device=DEVICE), None,
        torch.tensor([0, 0], device=DEVICE), None,
        outputs=frozenset(NAMES), dtype=torch.float32,
    )  # fmt: skip
    assert scores["log_probs"].tolist() == [0.0, -2e4]
    assert scores["entropies"].tolist() == [0.0, 0.0]
    (scores["log_probs"].sum() + scores["entropies"].sum()).backward()
    assert torch.isfinite(hidden.grad).all()


def test_no_row_at_all():
    leaves, _, _ = random_case(torch.float32, bias=False, temperature=False)
    hidden = leaves[0][:0].to(DEVICE).requires_grad_()
    weight = leaves[1].to(DEVICE).requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    scores = fused(none, None, torch.float32)(hidden, weight, None)
    assert scores["log_probs"].shape == (0,)
    scores["log_probs"].sum().backward()
    assert not weight.grad.any()


def test_a_target_of_another_ranks_part_only_loses():
    from dovetail_torch_engines.head_kernels import into_gradient

    torch.manual_seed(0)
    logits_RV = torch.randn(R, V)
    temperature_R, lse_R, given_R = torch.rand(R) + 0.5, torch.rand(R) + 9, torch.randn(R)
    grad_RV = logits_RV.clone().to(DEVICE)
    into_gradient(
        grad_RV, None, torch.full((R,), -1, device=DEVICE), temperature_R.to(DEVICE),
        lse_R.to(DEVICE), given_R.to(DEVICE), torch.zeros(R, device=DEVICE), None,
    )  # fmt: skip
    pi_RV = (logits_RV / temperature_R[:, None] - lse_R[:, None]).exp()
    expected_RV = -given_R[:, None] * pi_RV / temperature_R[:, None]
    torch.testing.assert_close(grad_RV.cpu(), expected_RV, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "upstream", [("log_probs_at",), ("log_probs", "entropies", "log_probs_at")]
)
def test_words_of_a_token_are_the_plain_formula(dtype, bias, upstream):
    leaves, targets_R, temperature_R = random_case(dtype, bias=bias, temperature=True)
    ids_RK = torch.stack([torch.randperm(V)[:7] for _ in range(R)])
    ids_RK[::3, 2] = targets_R[::3]
    given = {"log_probs": torch.randn(R), "entropies": torch.randn(R), "log_probs_at": torch.randn(R, 7)}  # fmt: skip

    def gradients(scores, own):
        sum((scores[name].double() * given[name].to(DEVICE)).sum() for name in upstream).backward()
        return [x.grad.double().cpu() for x in own if x is not None]

    def leaves_in(dtype, bias_dtype):
        dtypes = (dtype, dtype, bias_dtype)
        pairs = zip(leaves, dtypes, strict=True)
        return [None if x is None else x.clone().to(DEVICE, d).requires_grad_() for x, d in pairs]

    own = leaves_in(dtype, torch.float32)
    scores = head.score_tokens(
        *own, targets_R.to(DEVICE), temperature_R.to(DEVICE),
        outputs=frozenset({*upstream, "top_ids", "top_log_probs"}), dtype=dtype,
        ids_RK=ids_RK.to(DEVICE), top_k=9,
    )  # fmt: skip
    grads = gradients(scores, own)

    exact = leaves_in(torch.float64, torch.float64)
    z_RV = exact[0] @ exact[1].t() + (0 if exact[2] is None else exact[2])
    log_pi_RV = (z_RV / temperature_R.to(DEVICE)[:, None]).log_softmax(-1)
    expected = {
        "log_probs": log_pi_RV.gather(-1, targets_R.to(DEVICE)[:, None])[:, 0],
        "entropies": -(log_pi_RV.exp() * log_pi_RV).sum(-1),
        "log_probs_at": log_pi_RV.gather(-1, ids_RK.to(DEVICE)),
        "top_log_probs": log_pi_RV.topk(9).values,
    }
    expected_grads = gradients(expected, exact)
    tolerance = TOLERANCES[dtype]
    largest = expected["log_probs_at"].abs().max()
    for name in (*upstream, "top_log_probs"):
        assert (scores[name].double() - expected[name]).abs().max() <= tolerance * largest, name
    # Words with nearly equal logits may change places: compare the log-probabilities of the found words.
    likely = log_pi_RV.gather(-1, scores["top_ids"].long())
    assert (likely - expected["top_log_probs"]).abs().max() <= tolerance * largest
    for grad, other in zip(grads, expected_grads, strict=True):
        assert (grad - other).norm() <= tolerance * other.norm()
