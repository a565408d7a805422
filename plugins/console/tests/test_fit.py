"""Settings under which a run fits an accelerator: a plan of a model of 0.7 million parameters, and memories of a few MiB."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from dovetail.config import config_from_mapping
from dovetail.planning import Plan, make_plan
from dovetail_console.fit import USABLE, Fit, fitting
from dovetail_console.memory import estimate_memory
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    Qwen2Config(**sizes, **heads, dtype="bfloat16").save_pretrained(directory)
    return directory


@pytest.fixture
def plan(path: Path) -> Any:
    """A function that plans a run with vllm and fsdp2 under overrides."""

    def make(*overrides: str) -> Plan:
        mapping = {
            "model": {"path": str(path), "dtype": "bfloat16"},
            "data": {"train_batch_size": 16, "max_prompt_length": 32, "max_response_length": 96},
            "rollout": {"name": "vllm", "n": 4, "gpu_memory_utilization": 0.5},
            "actor": {"max_tokens_per_micro_batch": 4096},
        }
        return make_plan(config_from_mapping(mapping, overrides).config)

    return make


@pytest.fixture
def fit(plan: Any) -> Any:
    """A function that fits that run under overrides into a number of MiB."""

    def make(mib: float, *overrides: str) -> Fit:
        def planned(changes: Any) -> Plan:
            given = (f"{key}={json.dumps(value)}" for key, value in changes.items())
            return plan(*overrides, *given)

        found = fitting(planned, int(mib * 2**20))
        # With the proposed changes, the run takes the stated memory.
        made = planned(found.changes)
        memory = estimate_memory(made, card=found.card)
        assert found.least == max(map(memory.least, memory.phases))
        assert found.fits == (found.least <= round(USABLE * found.card))
        return found

    return make


def test_a_run_that_fits_is_left_as_it_is(fit: Any) -> None:
    found = fit(1024)
    assert found.fits
    assert not found.changes


@pytest.fixture
def alone(plan: Any) -> float:
    """The MiB of an accelerator that an update needs if nothing else is on the accelerator."""
    made = plan("rollout.offload=true")
    taken = estimate_memory(made).least("update of actor")
    return taken / USABLE / 2**20


def test_an_engine_with_a_share_takes_what_the_others_leave(fit: Any, alone: float) -> None:
    assert not fit(1.5 * alone).changes  # vLLM takes only the memory that samples need
    found = fit(1.5 * alone, "rollout.engine_args={kv_cache_memory_bytes: 1000}")
    assert found.fits
    assert found.changes.keys() == {"rollout.gpu_memory_utilization"}
    assert 0.1 < found.changes["rollout.gpu_memory_utilization"] < 0.5


def test_roles_take_turns_before_anything_costs_speed(fit: Any, alone: float) -> None:
    found = fit(1.01 * alone)
    assert found.fits
    assert found.changes["rollout.offload"] is True
    assert found.changes.keys() <= {
        "rollout.offload",
        "rollout.gpu_memory_utilization",
        "actor.offload",
    }


def test_what_costs_most_comes_last_and_what_it_makes_needless_goes(fit: Any) -> None:
    sizes = [40.0, 24.0, 14.0, 9.0, 6.0, 3.0]
    found = [fit(size, "actor.engine.gradient_checkpointing=false") for size in sizes]
    assert [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)
    fitted = [one for one in found if one.fits]
    assert "actor.engine.lora" not in fitted[0].changes
    assert "actor.engine.lora" in fitted[-1].changes


def test_the_least_that_was_found_is_shown_where_nothing_fits(fit: Any) -> None:
    found = fit(0.5)
    assert not found.fits
    assert found.changes["actor.engine.cpu_offload"] is True
    assert found.changes["actor.max_tokens_per_micro_batch"] == 128


def test_a_plan_prints_what_fits_as_overrides(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from dovetail.cli.main import main

    model = tiny_model_and_tokenizer(tmp_path / "model", vocab_size=300)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "1", "data_source": "gsm8k", "reward_model": {"ground_truth": "1"}}\n'
    )
    given = [f"model.path={model}", f"data.train_files={rows}", "data.train_batch_size=1"]
    given += ["data.plain_prompts=raw", "data.max_prompt_length=8", "data.max_response_length=8"]
    given += ["reward.function=gsm8k", "trainer.total_steps=1"]
    run = CliRunner().invoke(main, ["plan", *given, "--json", "--fit", "0.01MB"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.output)
    assert found["fit"]["card"] == int(0.01 * 2**20)
    assert not found["fit"]["fits"]
    assert found["memory"]["phases"]["update of actor"]["actor activations"] > 0
    assert (
        "fits accelerators of 8.0 GiB"
        in CliRunner().invoke(main, ["plan", *given, "--fit", "8gb"]).output
    )
    refused = CliRunner().invoke(main, ["plan", *given, "--fit", "much"])
    assert refused.exit_code == 2
    assert "'much' is not a memory size" in refused.output
