"""The peer on the accelerator's workload: verl 0.9.1's `main_ppo` with vLLM on one accelerator. Prints one line of JSON.

    python benchmarks/peers/verl_grpo.py --directory /tmp/gpu_step [--model 1.5b] [--fused] [key=value …]

In an environment with verl 0.9.1, which needs transformers 5.9, omegaconf 2.3 and `flash_attn`, and where TRL can't be imported.
`--fused` computes the loss by its Triton kernels, over Liger's layers and dynamic micro-batches; `key=value` are its own overrides.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_workload as workload
import pyarrow as pa
import pyarrow.parquet as pq

SKIPPED = 2
"""Steps that are left out of the medians."""
SECONDS = re.compile(r"timing_s/([\w/]+):(?:np\.float\d+\()?([-\d.e+]+)")


def command(args: argparse.Namespace) -> list[str]:
    """Write model, data and reward; verl's command for them."""
    home: Path = args.directory
    model = home / f"model-{args.model}"
    workload.make_model(model, seed=1, model=args.model)
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": "7"},
        }
        for text in workload.prompts(workload.PROMPTS * args.steps, args.prompt_tokens, seed=1)
    ]
    data = home / "verl.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data)
    reward = home / "reward.py"
    reward.write_text(workload.REWARD_FILE)
    at, role = "actor_rollout_ref", "actor_rollout_ref.actor"
    fused = [
        f"{at}.model.use_fused_kernels=True",
        f"{at}.model.fused_kernel_options.impl_backend=triton",
        f"{at}.model.use_liger=True",
        f"{role}.use_dynamic_bsz=True",
        f"{role}.ppo_max_token_len_per_gpu=40960",
        f"{at}.rollout.log_prob_max_token_len_per_gpu=81920",
    ]
    return [
        *(sys.executable, "-u", "-m", "verl.trainer.main_ppo"),
        *("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False"),
        *(f"data.train_files={data}", f"data.val_files={data}"),
        *(f"data.train_batch_size={workload.PROMPTS}", "data.max_prompt_length=256"),
        *(f"data.max_response_length={workload.NEW_TOKENS}", "data.shuffle=False"),
        *(f"{at}.model.path={model}", f"{at}.model.enable_gradient_checkpointing=True"),
        *(f"{at}.model.use_remove_padding=True", f"{role}.ppo_mini_batch_size={workload.PROMPTS}"),
        *(f"{role}.optim.lr=1e-6", f"{role}.use_kl_loss=False", f"{role}.entropy_coeff=0"),
        *(f"{at}.rollout.name=vllm", f"{at}.rollout.n={workload.RESPONSES}"),
        *(f"{at}.rollout.tensor_model_parallel_size=1", f"{at}.rollout.ignore_eos=True"),
        *(f"{at}.rollout.gpu_memory_utilization=0.5", f"{at}.rollout.max_num_seqs=512"),
        *(f"reward.custom_reward_function.path={reward}", "trainer.logger=[console]"),
        *("trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.total_epochs=1"),
        *(f"trainer.total_training_steps={args.steps}", "trainer.save_freq=-1"),
        *("trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.resume_mode=disable"),
        *(fused if args.fused else ()),
        *args.overrides,
    ]


def main() -> None:
    """Run it, and print the medians of its own timings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", choices=sorted(workload.MODELS), default="0.5b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=workload.PROMPT_TOKENS)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    began, ends, steps = time.perf_counter(), [], []
    with (args.directory / "verl.log").open("w") as log:
        run = subprocess.Popen(
            command(args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert run.stdout is not None
        for line in run.stdout:
            log.write(line)
            found = dict(SECONDS.findall(line))
            if found and re.search(r"\bstep:\d+ - ", line):
                ends.append(time.perf_counter() - began)
                steps.append({name: float(value) for name, value in found.items()})
    if run.wait() or len(steps) < args.steps:
        sys.exit(f"verl ended with {run.returncode} after {len(steps)} steps: see {log.name}")
    counted = steps[SKIPPED:]
    medians = {
        f"{name}_s": round(statistics.median(step[name] for step in counted if name in step), 3)
        for name in sorted(counted[-1])
    }
    result = {
        "system": f"verl{' fused' if args.fused else ''}",
        "model": args.model,
        **medians,
        "start_to_first_step_s": round(ends[0] - steps[0].get("step", 0.0), 1),
        "steps": len(counted),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
