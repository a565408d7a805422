"""The demo: what it is made of, and that held-out accuracy rises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "arithmetic"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's own modules can be imported, as when its scripts run."""
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_held_out_problems_are_never_trained_on(example, seed):
    from data import problems

    train, held_out = problems(seed)
    seen = {tuple(sorted(pair)) for pair in train}
    assert len(held_out) == 256
    assert not seen & {tuple(sorted(pair)) for pair in held_out}


def test_the_tutors_careful_answer_is_right_and_the_careless_one_forgets_carries(example):
    from data import needs_carry
    from warm_start import worked_answer

    for a in range(100):
        for b in range(100):
            assert worked_answer(a, b, carries=True).split("#### ")[1] == str(a + b)
            careless = int(worked_answer(a, b, carries=False).split("#### ")[1])
            assert (careless == a + b) == (not needs_carry(a, b))


def test_the_tokenizer_comes_back_from_disk_as_it_was(example, tmp_path):
    from model import make_base

    tokenizer = AutoTokenizer.from_pretrained(str(make_base(tmp_path, 1)))
    text = "7+8=15 3+4+1=8 #### 85"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def run_demo(out: Path, seed: int) -> dict[str, float]:
    """Run the demo as `make demo` does and return its summary."""
    command = [sys.executable, str(EXAMPLE / "demo.py"), "--out", str(out), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((out / "runs" / "arithmetic" / f"seed_{seed}" / "summary.json").read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed",
    [1, pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)],
)
def test_held_out_accuracy_rises(seed, tmp_path):
    summary = run_demo(tmp_path, seed)
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] > 0.8
    assert summary["seed"] == seed
    assert summary["train_seconds"] > 0
