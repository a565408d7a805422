"""What TensorRT-LLM is asked for, what is made of its answers, and what is refused before it is asked."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

from dovetail.errors import (
    ConfigError,
    ModelError,
    PlacementError,
    PluginNeedsError,
    RolloutError,
    WeightSyncError,
)
from dovetail.interfaces import FinishReason, SamplingParams
from dovetail.serving import starts_empty
from dovetail_rollout_trtllm import examination, versions
from dovetail_rollout_trtllm.calls import (
    chosen_log_probs,
    result_of,
    sampling_arguments,
    scores_of,
)
from dovetail_rollout_trtllm.engine_args import engine_arguments
from dovetail_rollout_trtllm.failures import FAILURES
from dovetail_rollout_trtllm.names import TensorNames
from dovetail_rollout_trtllm.server import main
from dovetail_rollout_trtllm.surroundings import TOKEN_VARIABLE, variables


def test_the_longest_sequence_bounds_prompts_too(config: Any, context: Any) -> None:
    """TensorRT-LLM takes prompts of 1,024 tokens only unless it is told."""
    arguments = engine_arguments(config(max_model_len=96), context())
    assert arguments["max_seq_len"] == arguments["max_input_len"] == 96
    whole = engine_arguments(config(), context())
    assert whole["max_input_len"] == whole["max_seq_len"] > 1024


def test_further_arguments_are_passed_on_and_ours_win(
    config: Any, context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {
        "attn_backend": "FLASHINFER",
        "dtype": "float16",
        "kv_cache_config": {"tokens_per_block": 64, "dtype": "fp8"},
    }
    with caplog.at_level(logging.WARNING):
        arguments = engine_arguments(config(engine_args=theirs), context())
    assert arguments["attn_backend"] == "FLASHINFER"
    assert arguments["dtype"] == "float32"
    assert arguments["kv_cache_config"]["tokens_per_block"] == 64
    assert arguments["kv_cache_config"]["dtype"] == "auto"
    assert "dtype='float16' (Dovetail sets 'float32')" in caplog.text
    assert "kv_cache_config.dtype" in caplog.text


def test_it_starts_empty_only_where_whole_weights_follow(config: Any, context: Any) -> None:
    assert starts_empty(config(), context(weights_follow=True))
    assert not starts_empty(config(), context())
    chosen = config(engine_args={"load_format": "auto"})
    assert not starts_empty(chosen, context(weights_follow=True))
    joined = config(mode="server", urls=("http://127.0.0.1:1",))
    assert not starts_empty(joined, context(weights_follow=True))


def test_a_server_gets_its_token_by_its_environment(config: Any, context: Any) -> None:
    assert variables(config(), context(), "secret")[TOKEN_VARIABLE] == "secret"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"urls": ("10.0.0.2:8000",), "mode": "server"}, "no address"),
        ({"urls": ("http://10.0.0.2:8000",)}, "rollout.mode=server"),
        ({"urls": ("http://a", "http://a/"), "mode": "server"}, "twice"),
        ({"port": 9000}, "servers that the run starts"),
        ({"kv_cache_memory": 1.0}, "kv_cache_memory"),
    ],
)
def test_settings_that_contradict_are_refused(config: Any, settings: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**settings)


# -- calls -------------------------------------------------------------------------------------


def test_what_ends_a_response_is_part_of_it_and_the_models_own_end_is_no_rule_of_the_engine() -> (
    None
):
    arguments = sampling_arguments(SamplingParams(max_new_tokens=3, stop_token_ids=(7,)), "p")
    assert arguments["stop_token_ids"] == [7]
    assert arguments["include_stop_str_in_output"]
    assert arguments["end_id"] == -1
    assert "stop" not in arguments
    assert not arguments["detokenize"]


def test_greedy_is_not_made_a_draw_by_its_other_settings() -> None:
    sampling = SamplingParams(max_new_tokens=3, temperature=0.0, top_p=0.5, top_k=9)
    arguments = sampling_arguments(sampling, "p")
    assert (arguments["temperature"], arguments["top_k"], arguments["top_p"]) == (0.0, 1, None)


def test_log_probs_are_asked_for_as_drawn_and_only_where_they_are_wanted() -> None:
    wanted = sampling_arguments(SamplingParams(max_new_tokens=3, log_probs=True), "processed")
    assert (wanted["logprobs"], wanted["logprobs_mode"]) == (0, "processed")
    assert "logprobs" not in sampling_arguments(SamplingParams(max_new_tokens=3), "processed")


def _ended(**output: Any) -> Any:
    found = {"token_ids": [4, 5], "logprobs": None, "finish_reason": "length", **output}
    return SimpleNamespace(outputs=[SimpleNamespace(**found)], error=None, context_logits=None)


def test_an_aborted_sample_comes_with_its_tokens_so_far() -> None:
    entries = [
        {4: SimpleNamespace(logprob=-0.5)},
        {9: SimpleNamespace(logprob=-9), 5: SimpleNamespace(logprob=-1.5)},
    ]
    result = result_of(_ended(finish_reason="cancelled", logprobs=entries), log_probs=True)
    assert result.finish_reason is FinishReason.ABORT
    np.testing.assert_array_equal(result.response_ids, [4, 5])
    assert result.log_probs is not None
    np.testing.assert_allclose(result.log_probs, [-0.5, -1.5])


def test_plain_numbers_are_taken_for_log_probs_too() -> None:
    found = chosen_log_probs([-0.25, -2.0], np.array([4, 5]))
    np.testing.assert_array_equal(found, np.array([-0.25, -2.0], np.float32))


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"finish_reason": "timeout"}, "'timeout'"),
        ({"logprobs": [-0.5]}, "1 log-probabilities for 2 tokens"),
        (
            {"logprobs": [{4: SimpleNamespace(logprob=0)}, {6: SimpleNamespace(logprob=0)}]},
            "token 5",
        ),
    ],
)
def test_answers_that_do_not_add_up_are_errors(output: Any, said: str) -> None:
    with pytest.raises(RolloutError, match=said):
        result_of(_ended(**output), log_probs=True)


def test_a_failed_request_is_an_error() -> None:
    request = _ended()
    request.error = "out of blocks"
    with pytest.raises(RolloutError, match="out of blocks"):
        result_of(request, log_probs=False)


def test_scores_are_those_of_each_following_token() -> None:
    request = _ended()
    request.context_logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [9.0, 9.0, 9.0]])
    scores = scores_of(request, [1, 2, 0])
    expected = request.context_logits[:2].log_softmax(-1)[[0, 1], [2, 0]]
    np.testing.assert_allclose(scores, expected.numpy(), rtol=1e-6)
    with pytest.raises(RolloutError, match="4 tokens and returned 3 rows"):
        scores_of(request, [1, 2, 0, 1])


def test_the_rollout_is_imported_without_what_its_engine_needs() -> None:
    """`dovetail doctor` imports every plugin."""
    code = "import sys, dovetail_rollout_trtllm.rollout; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "said"),
    [(None, "not installed"), ("1.2.1", "1.2.1 is installed"), ("1.3.0rc20", "1.3.0rc21 or newer")],
)
def test_a_missing_or_old_engine_is_refused_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    found = None if version is None else Version(version)
    monkeypatch.setattr(versions, "installed", lambda: found)
    with pytest.raises(PluginNeedsError, match=said) as refused:
        versions.require()
    assert "pypi.nvidia.com" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("version", "available", "said"),
    [
        (None, False, "pypi.nvidia.com"),
        ("1.2.1", False, "1.2.1 is too old"),
        ("1.4.0rc1", True, "has not run on it"),
    ],
)
def test_the_doctor_says_how_to_install_it_and_that_it_is_untried(
    monkeypatch: pytest.MonkeyPatch, version: str | None, available: bool, said: str
) -> None:
    found = None if version is None else Version(version)
    monkeypatch.setattr(examination, "installed", lambda: found)
    (row,) = examination.examine()
    assert row["available"] is available
    assert said in row["detail"]
    assert examination.UNTRIED in row["detail"]


def test_the_orchestrator_is_needed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: versions.OLDEST)
    monkeypatch.setattr(
        versions.importlib.util, "find_spec", lambda name: None if name == "ray" else 1
    )
    with pytest.raises(PluginNeedsError, match="`ray`"):
        versions.require()


@pytest.mark.parametrize(
    ("printed", "kind", "said"),
    [
        ("ValueError: LLM got invalid argument: max_batch_sizes", ConfigError, "max_batch_sizes"),
        (
            "ValueError: Unknown architecture for AutoModelForCausalLM: FooForCausalLM",
            ModelError,
            "Foo",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
            PlacementError,
            "0.5 of what",
        ),
        ("something else", RolloutError, "something else"),
    ],
)
def test_a_failed_start_is_told_in_words(
    config: Any, tmp_path: Any, printed: str, kind: type[Exception], said: str
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"(RayWorkerWrapper pid=17) [TRT-LLM] [E] {printed}\n")
    error = FAILURES.start(RuntimeError("the server ended with status 1"), log, config())
    assert type(error) is kind
    assert said in str(error)
    assert "pid=17" not in str(error)


def test_an_update_of_other_tensors_is_refused_before_it_is_sent(tiny: Any, context: Any) -> None:
    """TensorRT-LLM would load what it knows, and say nothing."""
    names = TensorNames.of(context().model)
    assert names is not None
    sent = sorted(min(group) for group in names.tied)
    names.refuse_other(1, sent)
    with pytest.raises(WeightSyncError, match=f"nothing for {sent[-1]}"):
        names.refuse_other(1, sent[:-1])
    with pytest.raises(WeightSyncError, match=r"not the model's: lm_head\.of\.nothing"):
        names.refuse_other(1, [*sent, "lm_head.of.nothing"])


def test_one_name_of_tied_tensors_is_enough(context: Any) -> None:
    names = TensorNames.of(context().model)
    assert names is not None
    tied = [group for group in names.tied if len(group) > 1]
    assert tied == [{"lm_head.weight", "model.embed_tokens.weight"}]
    others = [min(group) for group in names.tied if len(group) == 1]
    for name in tied[0]:
        names.refuse_other(1, [*others, name])
    names.refuse_other(1, [*others, *tied[0]])


def test_a_server_by_hand_wants_all_that_a_rollout_asks_about(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--arguments", '{"model": "m", "dtype": "bfloat16"}'])
    assert "lacks tensor_parallel_size, trust_remote_code" in capsys.readouterr().err
