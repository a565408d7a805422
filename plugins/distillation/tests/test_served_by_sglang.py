"""A teacher on a real SGLang server that a process of the run starts: its log-probabilities and words are those of transformers."""

import asyncio
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.telemetry import get_logger
from dovetail_distillation.servers import serve

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here"
    ),
]
STAND_INS = Path(__file__).parents[2] / "rollout_sglang" / "tests" / "stand_ins"
"""Stand-ins for SGLang's kernels on a machine without an accelerator."""


@pytest.fixture
def server(student, tmp_path, monkeypatch):
    arguments = {"dtype": "float32", "context_length": 128}
    if not torch.accelerator.is_available():
        monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
        arguments |= json.loads((STAND_INS / "arguments.json").read_text())
    setup = {
        "engine": "sglang",
        "model": str(student),
        "accelerators": int(torch.accelerator.is_available()),
        "arguments": arguments,
        "python": None,
        "seconds": 600,
        "log": str(tmp_path),
        "name": "own",
    }
    made = serve(json.dumps(setup).encode(), get_logger())
    yield made
    made.close()


def asked(server, ids, top_k):
    request = {"model": "any", "prompt": ids, "max_tokens": 1, "prompt_logprobs": top_k}
    answer = asyncio.run(server.call(json.dumps(request).encode()))
    assert answer.startswith(b"200 "), answer
    return json.loads(answer[4:])["choices"][0]["prompt_logprobs"]


def test_log_probabilities_and_words_are_the_models(server, student):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(student)
    ids = np.random.default_rng(0).integers(3, 300, 24).tolist()
    with torch.no_grad():
        log_pi_TV = network(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    first, *found = asked(server, ids, 5)
    assert first is None
    for word, entry, log_pi_V in zip(ids[1:], found, log_pi_TV, strict=True):
        best = log_pi_V.topk(5).indices.tolist()
        assert set(entry) == {str(word), *map(str, best)}
        for name, value in entry.items():
            assert value["logprob"] == pytest.approx(float(log_pi_V[int(name)]), abs=1e-4)
    # The first request compares words as text.
    _, *plain = asked(server, ids, 0)
    for word, entry in zip(ids[1:], plain, strict=True):
        assert entry[str(word)]["decoded_token"] == tokenizer.decode([word])
