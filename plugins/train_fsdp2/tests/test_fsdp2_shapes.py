"""Shape annotations of the head and the runner, which are enforced in tests."""

import pytest
import torch
from jaxtyping import TypeCheckError

from dovetail.interfaces import OUTPUTS
from dovetail_train_fsdp2 import forward
from dovetail_train_fsdp2.head import score_tokens, scores_of_logits
from dovetail_train_fsdp2.layout import lay_out

LOG_PROBS = frozenset({"log_probs"})
SPECS = (OUTPUTS["log_probs"],)


def score(**changes):
    given = {
        "hidden_RH": torch.zeros(3, 4),
        "weight_VH": torch.zeros(5, 4),
        "bias_V": torch.zeros(5),
        "targets_R": torch.zeros(3, dtype=torch.int64),
        "temperature_R": torch.ones(3),
    }
    return score_tokens(**{**given, **changes}, outputs=LOG_PROBS, dtype=torch.float32)


# Without the annotations both would run: by broadcasting, or because nothing checks the dtype.
@pytest.mark.parametrize(
    "wrong", [{"bias_V": torch.zeros(1)}, {"temperature_R": torch.ones(1).double()}], ids=str
)
def test_the_head_refuses_a_wrong_shape_or_dtype(wrong):
    assert score()["log_probs"].shape == (3,)
    with pytest.raises(TypeCheckError):
        score(**wrong)


def test_every_logit_row_has_one_target():
    targets_C = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeCheckError):
        scores_of_logits(torch.zeros(3, 5), targets_C, LOG_PROBS)


def test_the_runner_may_only_return_one_score_a_token(tiny, make_engine, new_batch, monkeypatch):
    runner = make_engine(tiny)._runner
    batch = new_batch(masked=False)
    layout = lay_out(batch, shared=False)
    assert runner(layout, SPECS)["log_probs"].shape == (layout.tokens,)
    monkeypatch.setattr(forward, "score_tokens", lambda *_, **__: {"log_probs": torch.zeros(())})
    with pytest.raises(TypeCheckError):
        runner(layout, SPECS)
