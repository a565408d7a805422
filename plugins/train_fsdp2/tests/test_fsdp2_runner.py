"""The runner as a module: the root of sharding, whose passes are collective even without a token to score."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.interfaces import OUTPUTS
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.layout import lay_out

LOG_PROBS = (OUTPUTS["log_probs"], OUTPUTS["entropies"])


@pytest.fixture
def runner(tiny, make_engine):
    return make_engine(tiny)._runner


def test_its_one_child_is_the_model_by_the_names_of_its_checkpoint(tiny, runner):
    assert [name for name, _ in runner.named_children()] == ["model"]
    plain = AutoModelForCausalLM.from_pretrained(tiny)
    assert set(dict(runner.model.named_parameters())) == set(dict(plain.named_parameters()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [[], [0, 3]])
def test_without_a_token_to_score_a_sharded_model_runs_and_nothing_moves(
    runner, unscored, packed, shared, rows
):
    layout = lay_out(unscored.take(np.array(rows, np.int64)), shared=shared, packed=packed)
    assert not runner(layout, LOG_PROBS)["log_probs"].requires_grad
    runner.sharded = True
    scores = runner(layout, LOG_PROBS)
    assert set(scores) == {"log_probs", "entropies"}
    for values in scores.values():
        assert values.tolist() == [0.0] * layout.tokens
    sum(values.sum() for values in scores.values()).backward()
    for name, parameter in runner.model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_the_cost_of_attention_is_that_of_its_products(runner):
    # Two layers with 32 features in their heads: half of two products (causal) of 2 · 32 operations per pair of tokens and layer.
    parameters = sum(p.numel() for p in runner.trunk.parameters())
    per_token = 2 * parameters
    per_pair = 2 * 2 * 32 * 2 / 2
    quadratic = runner.means(Fsdp2Config()).quadratic
    assert quadratic == pytest.approx(per_pair / per_token)


def test_a_model_without_weights_is_probed_once_they_are_there(tiny):
    from dovetail_train_fsdp2.forward import PolicyRunner

    whole = AutoModelForCausalLM.from_pretrained(tiny).eval()
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(whole.config).eval()
    runner = PolicyRunner(empty, torch.float32)
    assert runner.packs.why_not is not None
    assert runner.means(Fsdp2Config()).packing == "never"
    empty.to_empty(device="cpu")
    empty.load_state_dict(whole.state_dict())
    for name, buffer in whole.named_buffers():
        empty.get_buffer(name).copy_(buffer)
    runner.device = torch.device("cpu")
    runner.probe()
    assert runner.packs.why_not is None
    assert runner.can_share_prompts
