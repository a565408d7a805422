"""Times episodes of many turns against single-turn requests of the same lengths: one engine, in alternation.

    python benchmarks/episodes.py --directory /tmp/episodes --repeats 3

*episodes*: `--sessions` run at once, `--turns` turns of exactly `--new-tokens` each, and after each turn but the last a tool that takes
`--tool-seconds` and shows a short text. *single*: a request for each turn, all at once, whose prompt is what that turn of the last round
saw, so that prompts and responses have the same lengths; `--slots` bounds what the engine runs at once in both. Prints one JSON line:
medians in seconds, new tokens per second, and their ratio.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import Any

import attrs
import numpy as np
from rollout_layer import context, dovetail, parser

from dovetail.interfaces import (
    AgentLoop,
    BaseRollout,
    Outcome,
    PluginContext,
    Prompt,
    RewardManager,
    RolloutRequest,
    SamplingParams,
    Score,
    Session,
)
from dovetail.random_streams import SampleStream
from dovetail.sections import EpisodeSection, PluginSection
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.rollout import VllmRollout
from dovetail_rollouts import Episodes, Generation, Group, RolloutPool, Scorer
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import TEMPLATES

SHOWN = [
    {"role": "tool", "name": "wait", "tool_call_id": "call00000", "content": "The answer is 42."}
]


class Waiting(AgentLoop):
    """A tool of a fixed duration after each turn."""

    name = "waiting"
    api = ">=1.0,<2"
    Config = EpisodeSection

    def __init__(self, turns: int, new_tokens: int, tool_seconds: float) -> None:
        limits = EpisodeSection(max_turns=turns, max_turn_tokens=new_tokens)
        super().__init__(limits, PluginContext())
        self._tool_seconds = tool_seconds

    async def run(self, session: Session) -> None:
        while True:
            await session.generate()
            if len(session.turns) == self.config.max_turns:
                return
            await asyncio.sleep(self._tool_seconds)
            await session.observe(SHOWN)


class Zero(RewardManager):
    """Scores nothing."""

    name = "zero"
    api = ">=1.0,<2"

    async def score(self, samples: Any, time: Any) -> list[Outcome]:
        return [Score(value=0.0) for _ in samples]


def episodes(args: Any, engine: BaseRollout, attempt: int) -> tuple[int, list[RolloutRequest]]:
    """Run all sessions; return the tokens that were produced, and a request for each turn with what it saw as its prompt."""
    rng = np.random.default_rng(attempt)
    tokenizer = template_tokenizer(TEMPLATES["chatml"])
    sampling = SamplingParams(
        max_new_tokens=args.max_model_len - args.prompt_tokens, ignore_eos=True
    )
    groups = [
        Group(
            prompt=Prompt(
                index=index,
                epoch=attempt,
                prompt_ids=rng.integers(10, args.vocabulary, args.prompt_tokens),
                raw=[{"role": "user", "content": "question"}],
            ),
            n=1,
            sampling=sampling,
        )
        for index in range(args.sessions)
    ]

    async def draw() -> None:
        generation = Generation(
            pool=RolloutPool([engine]),
            scorer=Scorer(Zero(PluginSection(name="zero"), PluginContext()), timeout=60.0),
            tokenizer=tokenizer,
            seed=attempt,
            episodes=Episodes(Waiting(args.turns, args.new_tokens, args.tool_seconds), tokenizer),
        )
        await asyncio.gather(*generation.begin(groups))

    asyncio.run(draw())
    count, single = 0, []
    for group in groups:
        (sample,) = group.samples
        if sample.completion is None or sample.trajectory is None or sample.score is None:
            raise RuntimeError(f"{sample.sample_id} failed: {sample.outcome}")
        whole = np.concatenate([group.prompt.prompt_ids, sample.completion.response_ids])
        for number, turn in enumerate(sample.trajectory.turns):
            count += turn.stop - turn.start
            seen = whole[: args.prompt_tokens + turn.start]
            single.append(
                RolloutRequest(
                    request_id=f"single.{sample.sample_id}.{number}",
                    # Other tokens in another order, of the same number: no cache knows them.
                    prompt_ids=rng.permutation(seen) if args.cold else seen,
                    sampling=attrs.evolve(sampling, max_new_tokens=turn.stop - turn.start),
                    streams=(SampleStream(seed=attempt, prompt=len(single)),),
                )
            )
    return count, single


def main() -> None:
    """Measure."""
    options = parser(__doc__)
    options.add_argument("--sessions", type=int, default=320)
    options.add_argument("--slots", type=int, default=256)
    options.add_argument("--turns", type=int, default=8)
    options.add_argument("--tool-seconds", type=float, default=0.05)
    options.add_argument(
        "--cold", action="store_true", help="single-turn prompts that no cache knows"
    )
    options.set_defaults(new_tokens=128, repeats=3)
    args = options.parse_args()
    config = VllmRolloutConfig(
        name="vllm",
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
        enforce_eager=args.enforce_eager,
        max_num_seqs=args.slots,
    )
    engine = VllmRollout(config, context(args))
    engine.start()
    seconds: dict[str, list[float]] = {"episodes": [], "single": []}
    tokens = 0
    try:
        for attempt in range(args.repeats + 1):  # the first of each warms up
            began = time.perf_counter()
            tokens, single = episodes(args, engine, attempt)
            seconds["episodes"].append(time.perf_counter() - began)
            asyncio.run(engine.reset_cache())
            began = time.perf_counter()
            count = dovetail(engine, single)
            seconds["single"].append(time.perf_counter() - began)
            asyncio.run(engine.reset_cache())
            if count != tokens:
                raise RuntimeError(f"{count} tokens by single turns, {tokens} by episodes")
            sys.stderr.write(f"{attempt}: {tokens} tokens, {seconds}\n")
    finally:
        engine.close()
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    figures = {
        **{f"{name}_s": value for name, value in medians.items()},
        **{f"{name}_tokens_per_s": tokens / value for name, value in medians.items()},
        "ratio": medians["single"] / medians["episodes"],
        "all_s": seconds,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
