"""The programs of examples/programs, on real clients and frameworks: training uses exactly the served tokens, in one sequence."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import pytest
from gateway_episodes import run_command

from dovetail.interfaces import RolloutRequest

PROGRAMS = Path(__file__).resolve().parents[3] / "examples" / "programs"
EPISODES = 50


def multiplying(request: RolloutRequest, _prompt: str) -> str:
    """Think at times, call the tool once or twice, once or a few times, now and then in a way that can't be read, and answer."""
    stream = request.streams[0]
    rng = random.Random(f"{stream.sample} {stream.turn}")
    thought = "<think>\nlet me see\n</think>\n\n" * (rng.random() < 0.5)
    if stream.turn and rng.random() < 0.4:
        return f"{thought}It is {rng.random()}."
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": %d, "b": %r}}\n</tool_call>'
    calls = [call % (rng.randrange(100), rng.random()) for _ in range(rng.choice([1, 1, 2]))]
    text = rng.choice(["", "", "I multiply. é\n"])
    if rng.random() < 0.1:
        calls[-1] = calls[-1].replace("}}", "")
    return thought + text + "\n".join(calls)


@pytest.mark.proofs
@pytest.mark.parametrize(
    ("program", "needs"),
    [
        pytest.param("with_openai.py", "openai", id="openai"),
        pytest.param("with_anthropic.py", "anthropic", id="anthropic"),
        pytest.param("with_agents_sdk.py", "agents", id="openai-agents"),
        pytest.param("with_langgraph.py", "langgraph", id="langgraph"),
    ],
)
def test_episodes_of_a_program_are_one_sequence_each_of_what_the_engine_saw(
    program: str, needs: str, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    try:
        importlib.import_module(needs)
    except ImportError:
        pytest.skip(f"{needs} is not installed here; `make proofs` has it")
    drawn = run_command(
        [sys.executable, str(PROGRAMS / program)],
        multiplying,
        tmp_path,
        n=EPISODES,
        tokens=20_000,
        concurrency=4,
        models=("*",),
        environment={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    )
    drawn.audit()
    for sample in drawn.samples:
        assert sample.score == 1, sample.outcome
        assert sample.trajectory is not None
        assert sample.trajectory.output["answer"]
    trained = sum(int(s.produced_T.sum()) for sample in drawn.samples for s in sample.sequences)
    produced = sum(len(completion.response_ids) for _, completion in drawn.calls)
    sequences = sum(len(sample.sequences) for sample in drawn.samples) / EPISODES
    counts = [sample.trajectory.counts for sample in drawn.samples if sample.trajectory]
    prompts, unique = (
        sum(c[name] for c in counts) for name in ("prompt_tokens", "unique_prompt_tokens")
    )
    calls = sum(c["model_calls"] for c in counts)
    figures = f"{EPISODES} episodes, {calls:.0f} calls; sequences an episode {sequences:.2f}, tokens trained / produced {trained / produced:.3f}, prompt tokens / unique {prompts / unique:.3f}"
    record_property("figures", figures)
    sys.stdout.write(f"{needs}: {figures}\n")
    assert calls > 2 * EPISODES
    assert (sequences, trained, prompts) == (1, produced, unique)
