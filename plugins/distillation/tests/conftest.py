"""Tiny teachers and students, a config, and a server that scores prompts as vLLM's does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_sdk.testing.fake_server import FakeServer, reply


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("student"), vocab_size=300)


@pytest.fixture(scope="session")
def teacher(student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the student's tokenizer; its larger weights give more peaked distributions."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(student)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(student).save_pretrained(path)
    return path


@pytest.fixture
def config(student: Path, teacher: Path, tmp_path: Path) -> Path:
    """The config of two steps on samples of the student, with a teacher as a role."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a} + 1 ="}],
            "response": str(a + 1),
            "data_source": "even" if a % 2 == 0 else "odd",
            "reward_model": {"ground_truth": str(a + 1)},
        }
        for a in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(solution_str) / 50\n"
    )
    document = {
        "seed": 3,
        "project": "tests",
        "experiment": "run",
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(student), "dtype": "float32"},
        "data": {
            "train_files": [str(tmp_path / "rows.jsonl")],
            "train_batch_size": 4,
            "max_prompt_length": 64,
            "max_response_length": 16,
        },
        "rollout": {"name": "hf", "n": 2},
        "actor": {"engine": "fsdp2", "optim": {"lr": 1.0e-3}},
        "roles": {"teacher": {"path": str(teacher)}},
        "reward": {"function": {"path": str(tmp_path / "reward.py"), "attribute": "compute_score"}},
        "trainer": {"total_steps": 2},
        "tracking": ["jsonl"],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def without_role(config: Path) -> Path:
    """The config without a teacher."""
    document = yaml.safe_load(config.read_text())
    del document["roles"]
    path = config.with_name("without_role.yaml")
    path.write_text(yaml.safe_dump(document))
    return path


class PromptScores(FakeServer):
    """A server of one model that scores prompts.

    Attributes:
        requests: the requests received.
        alter: changes an answer before it is sent: (number of the request, answer) → status and answer.
    """

    def __init__(self, path: Path, name: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        super().__init__()
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._name, self._lock = name, threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.alter: Callable[[int, Any], tuple[int, Any]] = lambda _, answer: (200, answer)
        self.answers["*"] = self._reply

    def _reply(self, request: Any) -> None:
        asked = json.loads(request.body)
        with self._lock:
            self.requests.append(asked)
            status, answer = self.alter(len(self.requests), self.answer(asked))
        reply(request, status, json.dumps(answer).encode())

    def answer(self, request: dict[str, Any]) -> Any:
        """Return vLLM's answer: log-probabilities of each token but the first, and of the most likely words at its position."""
        if request["model"] != self._name:
            return {"error": {"message": f"The model `{request['model']}` does not exist."}}
        ids = torch.tensor([request["prompt"]])
        with torch.no_grad():
            log_pi_LV = self._model(ids).logits[0].log_softmax(-1)
        scores: list[Any] = [None]
        for place in range(1, ids.shape[1]):
            top = log_pi_LV[place - 1].topk(request["prompt_logprobs"])
            words = [int(ids[0, place]), *top.indices.tolist()]
            scores.append({str(word): self._word(word, log_pi_LV[place - 1]) for word in words})
        return {"choices": [{"text": "", "prompt_logprobs": scores}]}

    def _word(self, word: int, log_pi_V: torch.Tensor) -> dict[str, Any]:
        return {"logprob": float(log_pi_V[word]), "decoded_token": self._tokenizer.decode([word])}


@pytest.fixture
def server(teacher: Path) -> Iterator[PromptScores]:
    with PromptScores(teacher, "teacher-1") as made:
        yield made
