"""Times one update of a random-weight Qwen2.5 through the training engine, on any number of ranks of this machine.

    python benchmarks/update_speed.py --run "max_tokens_per_micro_batch=16384" --run "compile=true"
    python benchmarks/update_speed.py --model 1.5b --ranks 4 --lengths skewed --partition arrival
    python benchmarks/update_speed.py --samples 2 --response 65408 --run "max_tokens_per_micro_batch=65536"
    python benchmarks/update_speed.py --ranks 2 --run "engine=megatron tensor_parallel_size=2" --run "engine=fsdp2"

Every `--run` is one configuration: `key=value` of the engine's config, of the training section, or of the model
section; `engine=megatron` takes that engine in place of fsdp2. Prints one JSON line each: medians over the measured updates, and the settings. Utilisation is model FLOPs over time
and peak: 6·N·T for N parameters (a tied embedding counts once) and T tokens, prompts included; apart from it with
attention, 6·layers·heads·head size·ΣL² more (causal, forward and backward). Recomputation counts for nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 256,
             "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    "0.5b": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
             "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5b": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
             "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
}  # fmt: skip
"""Shapes of Qwen2.5, and of a small model for machines without an accelerator."""


def make_model(directory: Path, size: str, seed: int) -> None:
    """Write a random-weight model of that size."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **SIZES[size], max_position_embeddings=131072, rope_theta=1e6, tie_word_embeddings=True
    )
    torch.manual_seed(seed)
    with torch.device(torch.accelerator.current_accelerator() or "cpu"):
        model = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(str(directory))


def make_batch(args: argparse.Namespace) -> Any:
    """Random prompts and responses with random advantages, in the shape that the options ask for."""
    from dovetail.batch import Batch, Ragged

    rng = np.random.default_rng(args.seed)
    lengths_N = np.full(args.samples, args.response)
    if args.lengths == "skewed":
        # Most responses are short and a few are as long as allowed, as answers of reasoning models are.
        lengths_N = np.minimum(
            args.response, 16 + rng.lognormal(np.log(args.response / 8), 1.0, args.samples)
        ).astype(np.int64)
    vocabulary = SIZES[args.model]["vocab_size"]
    prompts = [
        rng.integers(0, vocabulary, args.prompt)
        for _ in range(-(-args.samples // args.responses_a_prompt))
    ]
    mask = Ragged.from_list([np.ones(n, bool) for n in lengths_N], dtype=bool)
    return Batch(
        {
            "prompt_ids": Ragged.from_list(
                [prompts[i // args.responses_a_prompt] for i in range(args.samples)], dtype=np.int64
            ),
            "response_ids": mask.with_values(rng.integers(0, vocabulary, len(mask.values))),
            "response_mask": mask,
            "temperature": np.full(args.samples, args.temperature, np.float32),
            "advantages": rng.normal(size=args.samples).astype(np.float32),
        }
    )


def make_objective(entropy: float) -> Any:
    """On-policy GRPO: PPO's clipped loss over token means, without a pass for old log-probabilities."""
    from dovetail.config.builtin import TokenMeanConfig
    from dovetail.interfaces import ObjectiveSpec, PluginRef
    from dovetail_algorithms.config.losses import PpoClipConfig

    return ObjectiveSpec(
        policy_loss=PluginRef(kind="policy_loss", name="ppo_clip", config=PpoClipConfig()),
        loss_aggregation=PluginRef(
            kind="loss_aggregation", name="token_mean", config=TokenMeanConfig()
        ),
        old_log_probs_from_current=True,
        entropy_coef=entropy,
    )


def shares(batch: Any, ranks: int, partition: str) -> list[Any]:
    """A batch for each rank: balanced by tokens as dispatch does it, or cut in the order of arrival."""
    from dovetail.dispatch.division import divide

    if partition == "balanced":
        return divide(batch, ranks, "sample").shares(batch)
    return [batch.take(rows) for rows in np.array_split(np.arange(len(batch)), ranks)]


def settings_of(run: str) -> dict[str, Any]:
    """`key=value` words as JSON values, or as strings where they are none."""
    settings = {}
    for word in run.split():
        key, _, value = word.partition("=")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings


def make_engine(model: Path, settings: dict[str, Any], rank: int, ranks: int, device: str) -> Any:
    """The engine of one rank, started."""
    from dovetail.config.sections import ModelSection, TrainingSection
    from dovetail.dispatch.mesh import Mesh
    from dovetail.dispatch.processes import reduction_over
    from dovetail.interfaces import PluginContext

    def part(kind: type, **given: Any) -> Any:
        names = {field.name for field in attrs.fields(kind)}
        return kind(**given, **{k: settings.pop(k) for k in sorted(names & settings.keys())})

    settings = dict(settings)
    config_class, engine_class = classes_of(settings.pop("engine", "fsdp2"))
    config, training = part(config_class), part(TrainingSection)
    dtype = settings.pop("dtype", "float32" if device == "cpu" else "bfloat16")
    section = part(ModelSection, path=str(model), dtype=dtype)
    if settings:
        raise SystemExit(f"no section has {', '.join(settings)}")
    mesh = Mesh.over(ranks, **config.mesh_axes())
    context = PluginContext(
        role="actor", seed=1, model=section, training=training, total_steps=1000, mesh=mesh,
        rank=rank, device=device, reduction=reduction_over(mesh, rank),
    )  # fmt: skip
    engine = engine_class(config, context)
    engine.start()
    return engine


def classes_of(engine: str) -> tuple[type, type]:
    """An engine's config class and its own."""
    if engine == "megatron":
        from dovetail_train_megatron.config import MegatronConfig
        from dovetail_train_megatron.engine import MegatronEngine

        return MegatronConfig, MegatronEngine
    from dovetail_train_fsdp2.config import Fsdp2Config
    from dovetail_train_fsdp2.engine import Fsdp2Engine

    return Fsdp2Config, Fsdp2Engine


class Device:
    """What differs between an accelerator and a CPU: waiting for it, and its memory."""

    def __init__(self, name: str) -> None:
        import torch

        self.name, self._torch = name, torch
        self.accelerated = name != "cpu"

    def wait(self) -> None:
        """Until everything that was started is done."""
        if self.accelerated:
            self._torch.accelerator.synchronize()

    def clear(self) -> None:
        """Forget what was freed, and the peak."""
        gc.collect()
        if self.accelerated:
            self._torch.accelerator.empty_cache()
            self._torch.accelerator.reset_peak_memory_stats()

    def peak_gib(self) -> dict[str, float]:
        """Peaks since `clear`, of what tensors held and of what the allocator held."""
        if not self.accelerated:
            return {}
        accelerator = self._torch.accelerator
        return {
            "peak_gib": round(accelerator.max_memory_allocated() / 2**30, 2),
            "peak_reserved_gib": round(accelerator.max_memory_reserved() / 2**30, 2),
        }


def parameters_of(model: Path) -> int:
    """Parameters of the whole model, tied ones once."""
    from safetensors import safe_open

    total = 0
    for file in model.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def figures(
    args: argparse.Namespace, seconds: Sequence[float], parameters: int, batch: Any, ranks: int
) -> dict[str, Any]:
    """What follows from the seconds of every measured update."""
    size = SIZES[args.model]
    lengths_N = (batch["prompt_ids"].lengths + batch["response_ids"].lengths).astype(np.float64)
    tokens, middle = int(lengths_N.sum()), statistics.median(seconds)
    # The heads' sizes multiply out to the hidden size in these models.
    attention = 6 * size["num_hidden_layers"] * size["hidden_size"] * float((lengths_N**2).sum())
    available = args.peak_tflops * 1e12 * ranks * middle
    return {
        "seconds": round(middle, 3),
        "all_seconds": [round(s, 3) for s in seconds],
        "tokens_per_s": round(tokens / middle),
        "mfu_6nt": round(6 * parameters * tokens / available, 4),
        "mfu_with_attention": round((6 * parameters * tokens + attention) / available, 4),
        "tokens": tokens,
        "parameters": parameters,
    }


def measure(
    args: argparse.Namespace, model: Path, run: str, rank: int, device: Device
) -> dict[str, Any]:
    """One configuration: its figures, with the slowest rank's seconds and the largest rank's memory."""
    import torch.distributed as dist

    together = dist.is_initialized()
    whole = make_batch(args)
    objective = make_objective(args.entropy)
    device.clear()
    started = time.perf_counter()
    engine = make_engine(model, settings_of(run), rank, args.ranks, device.name)
    start_s = time.perf_counter() - started
    try:
        parameters, mesh = parameters_of(model), engine.context.mesh
        # Ranks that share samples are given the same ones.
        parts = shares(whole, mesh.axis_size("dp"), args.partition)
        mine = parts[mesh.coordinates(rank)["dp"]]
        seconds, first_s = [], 0.0
        for number in range(args.warm_up + args.updates):
            if number == args.warm_up:
                device.clear()
            device.wait()
            if together:
                dist.barrier()
            begun = time.perf_counter()
            engine.update(mine, objective)
            device.wait()
            seconds.append(time.perf_counter() - begun)
            first_s = first_s or seconds[0]
        peak = device.peak_gib()
        if args.profile:
            profile(engine, mine, objective, args, rank)
    finally:
        engine.close()
    measured = (seconds[args.warm_up :], peak)
    ranks = [measured]
    if together:
        gathered: list[Any] = [None] * args.ranks
        dist.all_gather_object(gathered, measured)
        ranks = gathered
    slowest = [max(of_ranks) for of_ranks in zip(*(s for s, _ in ranks), strict=True)]
    return {
        **figures(args, slowest, parameters, whole, args.ranks),
        **{name: max(peaks[name] for _, peaks in ranks) for name in peak},
        "first_update_s": round(first_s, 1),
        "start_s": round(start_s, 1),
    }


def profile(engine: Any, batch: Any, objective: Any, args: argparse.Namespace, rank: int) -> None:
    """Print where the device's time of one update goes."""
    import torch

    with torch.profiler.profile() as profiler:
        begun = time.perf_counter()
        engine.update(batch, objective)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        wall = time.perf_counter() - begun
    if rank:
        return
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    # Kernels themselves, not the operators that started them: each second counts once.
    kernels = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU] or events
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    sys.stdout.write(f"# profiled update: {wall:.3f} s, kernels {busy:.3f} s\n")
    for event in kernels[: args.top]:
        sys.stdout.write(
            f"# {event.self_device_time_total / 1e3:9.1f} ms {event.count:6d} x  {event.key[:120]}\n"
        )
    operators = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    for event in operators[: args.top // 2]:
        sys.stdout.write(
            f"# host {event.self_cpu_time_total / 1e3:9.1f} ms {event.count:6d} x  {event.key[:100]}\n"
        )
    sys.stdout.flush()


def work(rank: int, args: argparse.Namespace, model: Path, address: str) -> None:
    """One rank: every configuration, one after the other."""
    import torch

    from dovetail.dispatch.processes import join_processes, leave_processes

    kind = args.device or (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    device = Device("cpu" if kind == "cpu" else f"{kind}:{rank}")
    if device.accelerated:
        torch.accelerator.set_device_index(rank)
    if args.ranks > 1:
        join_processes(address=address, rank=rank, world=args.ranks, device=device.name)
    if rank == 0:
        make_model(model, args.model, args.seed)
    if args.ranks > 1:
        torch.distributed.barrier()
    failed = False
    for run in args.run or [""]:
        line = {name: getattr(args, name) for name in
                ("model", "ranks", "lengths", "samples", "prompt", "response", "partition")}  # fmt: skip
        try:
            line |= measure(args, model, run, rank, device)
        except Exception as error:
            # With others, who wait in a collective, there is no going on.
            failed = True
            line["error"] = f"{type(error).__name__}: {error}"
            sys.stderr.write(traceback.format_exc())
            if args.ranks > 1:
                raise
        finally:
            if rank == 0:
                sys.stdout.write(json.dumps(line | {"run": settings_of(run)}) + "\n")
                sys.stdout.flush()
        device.clear()
    leave_processes()
    if failed:
        raise SystemExit(1)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SIZES), default="0.5b")
    parser.add_argument("--run", action="append", help="key=value …; may be given many times")
    parser.add_argument("--lengths", choices=("equal", "skewed"), default="equal")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512, help="tokens; skewed: at most")
    parser.add_argument("--responses-a-prompt", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--entropy", type=float, default=0.0, help="coefficient; 0 asks for none")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--partition", choices=("balanced", "arrival"), default="balanced")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="of one device")
    parser.add_argument("--profile", action="store_true", help="and print the costliest kernels")
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--device", help="cpu, or what torch.accelerator finds")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


def main() -> None:
    """Start the ranks, and wait for them."""
    args = parse()
    with tempfile.TemporaryDirectory() as home:
        model, address = Path(home) / "model", f"file://{home}/join"
        if args.ranks == 1:
            work(0, args, model, address)
            return
        spawning = multiprocessing.get_context("spawn")
        ranks = [
            spawning.Process(target=work, args=(rank, args, model, address))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            time.sleep(0.2)
            if any(process.exitcode for process in ranks):
                # The others wait for the one that failed.
                for process in ranks:
                    process.terminate()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
