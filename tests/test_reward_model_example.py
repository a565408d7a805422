"""The example that trains a reward model: its steps are Bradley–Terry's, and what it writes scores as it was trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from dovetail.interfaces import PluginContext, PluginRef
from dovetail.plugins import make_plugin
from dovetail.scoring.scorer import Scorer
from dovetail.sections import ModelSection, OptimSection, RewardSection, TrainingSection
from dovetail_rewards.model_config import RewardModelConfig
from dovetail_sdk.testing import make_sample, tiny_model, tiny_tokenizer

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "reward_model"


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's own modules can be imported, as when its scripts run."""
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny value model of random weights, whose scores differ from the beginning."""
    directory = tmp_path / "base"
    tiny_model(directory, tiny_tokenizer(directory, vocab_size=300), head="value", seed=3)
    return directory


def engine_of(base: Path, **training: Any) -> Any:
    """A started engine with a value head."""
    context = PluginContext(
        role="reward_model",
        head="value",
        model=ModelSection(path=str(base), dtype="float32"),
        training=TrainingSection(**training),
        tokenizer=AutoTokenizer.from_pretrained(str(base)),
    )
    engine: Any = make_plugin(PluginRef(kind="engine", name="fsdp2"), context)
    engine.start()
    return engine


def test_no_numbers_of_a_held_out_pair_stand_together_in_training():
    from pairs import larger_numbers

    train, held_out = larger_numbers(1)
    seen = {(pair.chosen, pair.rejected) for pair in train}
    assert not seen & {(pair.chosen, pair.rejected) for pair in held_out}
    assert all(int(pair.chosen) > int(pair.rejected) for pair in (*train, *held_out))


def test_a_file_without_a_key_is_refused_by_its_line(tmp_path):
    from pairs import read_pairs

    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": 1}\n'
    )
    with pytest.raises(ValueError, match="line 2: wants a prompt"):
        read_pairs(path)


@pytest.mark.parametrize("budget", [16, 16384])
def test_one_step_is_that_of_the_loss_on_whole_pairs(base, tmp_path, budget):
    """Against torch's own derivative of equation 1 over transformers' model; a budget of 16 tokens gives every pair a micro-batch."""
    from pairs import larger_numbers
    from train import OBJECTIVE, to_batch

    pairs, lr = larger_numbers(0)[0][:6], 0.5
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    model = AutoModelForTokenClassification.from_pretrained(str(base), dtype=torch.float32).eval()
    model.requires_grad_(True)
    given = []
    for pair in pairs:
        for response in (pair.chosen, pair.rejected):
            ids = tokenizer.apply_chat_template(pair.conversation(response), return_dict=False)
            given.append(model(input_ids=torch.tensor([ids])).logits[0, -1, 0])
    r = torch.stack(given)
    (-torch.nn.functional.logsigmoid(r[::2] - r[1::2]).mean()).backward()

    sgd = OptimSection(name="sgd", lr=lr, weight_decay=0.0)
    engine = engine_of(base, optim=sgd, grad_clip=0.0, max_tokens_per_micro_batch=budget)
    engine.update(to_batch(pairs, tokenizer), OBJECTIVE)
    engine.export(tmp_path / "stepped")
    engine.close()
    stepped = AutoModelForTokenClassification.from_pretrained(
        str(tmp_path / "stepped"), dtype=torch.float32
    )
    assert model.score.weight.grad.abs().max() > 1e-3
    for (name, before), after in zip(model.named_parameters(), stepped.parameters(), strict=True):
        expected = before.detach() - lr * before.grad
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=2e-6, msg=name)


def test_it_learns_and_what_it_writes_scores_as_a_reward_model(base, tmp_path):
    from pairs import Pair
    from train import scores, to_batch, train

    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdef"), 5)) for _ in range(120)]
    pairs = [Pair(prompt=text[:2], chosen=f"{text}!", rejected=f"{text}?") for text in texts]
    learned, out = pairs[:80], tmp_path / "model"
    result = train(base, learned, pairs[80:], out, steps=25, batch_pairs=16, lr=3e-3)
    assert result["after"]["accuracy"] > max(0.9, result["before"]["accuracy"] - 1e-9)
    assert result["after"]["loss"] < 0.5 * result["before"]["loss"]

    engine = engine_of(out)
    expected = scores(engine, to_batch(pairs[80:], AutoTokenizer.from_pretrained(str(out))))
    engine.close()
    config = RewardModelConfig(name="reward_model", model=str(out), dtype="float32", device="cpu")
    ref = PluginRef(kind="reward_manager", name="reward_model", config=config)
    manager: Any = make_plugin(ref, PluginContext())
    manager.start()

    async def main() -> Any:
        scorer = Scorer(manager, timeout=RewardSection().timeout)
        for number, pair in enumerate(pairs[80:]):
            for name, text in (("w", pair.chosen), ("l", pair.rejected)):
                row = make_sample(f"{number}.{name}", text, prompt=pair.prompt)
                scorer.add(row, group=number, group_size=2)
        return await scorer.finish()

    outcomes = asyncio.run(main())
    manager.close()
    assert [outcome.value for outcome in outcomes.values()] == pytest.approx(expected, abs=1e-3)
