"""A teacher behind a real vLLM server: its log-probabilities and words are those of transformers. Legend: T tokens, K words."""

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
import torch
from run_files import steps_of

from dovetail import train
from dovetail.batch import Batch, Ragged
from dovetail_distillation.config import EndpointSection
from dovetail_distillation.endpoint import Endpoint, TeacherError
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_serving import free_port

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
    ),
]
K = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_and_tokenizer(
        tmp_path_factory.mktemp("model"), vocab_size=300, hidden_size=64, heads=2, kv_heads=2
    )


@pytest.fixture(scope="module")
def url(model):
    """A server of the model that returns at most 40 words per token."""
    port = free_port()
    options = {"max-model-len": "128", "dtype": "float32", "host": "127.0.0.1", "port": str(port)}
    options |= {"served-model-name": "teacher", "max-logprobs": "40"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    server = subprocess.Popen(
        [*command, "--enforce-eager"],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
    )
    try:
        while True:
            assert server.poll() is None
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def test_the_servers_log_probabilities_are_the_models(url, model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rng = np.random.default_rng(0)
    mask = Ragged.from_list([np.ones(n, bool) for n in (5, 30, 1)], dtype=bool)
    batch = Batch(
        {
            "prompt_ids": Ragged.from_list([rng.integers(3, 300, 4) for _ in range(3)], np.int64),
            "response_ids": mask.with_values(rng.integers(3, 300, mask.total)),
            "response_mask": mask,
            "temperature": np.ones(3, np.float32),
        }
    )
    endpoint = Endpoint("teacher", EndpointSection(url=url, model="teacher"))
    endpoint.check(AutoTokenizer.from_pretrained(model))
    found = asyncio.run(endpoint.score(batch, K))

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = []
    for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            rows.append(network(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1))
    log_pi_TV = torch.cat(rows)
    chosen_T = log_pi_TV.gather(-1, torch.from_numpy(batch["response_ids"].values)[:, None])[:, 0]
    top = log_pi_TV.topk(K)
    for name, expected in (
        ("teacher_log_probs", chosen_T),
        ("teacher_top_log_probs", top.values),
        ("teacher_top_ids", top.indices),
    ):
        np.testing.assert_allclose(found[name].values, expected.numpy(), atol=1e-5, err_msg=name)

    for settings, words, said in (
        ({"model": "other"}, 4, "404.*other"),
        ({"model": "teacher"}, 50, "400.*50"),
    ):
        wrong = Endpoint("teacher", EndpointSection(url=url, retries=0, **settings))
        with pytest.raises(TeacherError, match=said):
            asyncio.run(wrong.score(batch, words))


@pytest.mark.ray
def test_the_run_starts_vllm_for_its_teacher(model, without_role, tmp_path, monkeypatch):
    """The teacher is the student itself, so the divergence is 0."""
    pytest.importorskip("ray", reason="needs dovetail-runtime-ray")
    for name, value in {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}.items():
        monkeypatch.setenv(name, value)
    arguments = {"max_model_len": 128, "dtype": "float32", "enforce_eager": True}
    serve = {"accelerators": 0, "arguments": arguments}
    stage = {
        "name": "score_teacher",
        "teachers": {"default": "own"},
        "endpoints": {"own": {"model": str(model), "timeout": 600, "serve": serve}},
    }
    stages = f"algorithm.stages=[{json.dumps(stage)}, {{name: teacher_advantage, reward_coef: 0}}]"
    overrides = [f"model.path={model}", stages, "runtime=ray", "trainer.total_steps=1"]
    train(without_role, [*overrides, "experiment=served"])
    (step,) = steps_of(tmp_path / "runs" / "tests" / "served")
    assert abs(step["distill/reverse_kl"]) < 1e-4
