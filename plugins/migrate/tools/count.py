"""Count over verl's scripts: how many are recorded, imported, pass the full check, and equal verl's own composed config.

    python count.py VERL VERL_RECIPE --hydra PYTHON --tokenizer DIRECTORY --rows PROMPTS.parquet HELD_OUT.parquet EXAMPLES.parquet --out DIRECTORY

VERL and VERL_RECIPE are checkouts; PYTHON is an interpreter with hydra-core. Models are stand-ins of their shapes, and data
and files of the job's own that are not here are stand-ins, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from shapes import make_model

from dovetail import check
from dovetail.config import load_config
from dovetail.errors import DovetailError
from dovetail_migrate.draft import Draft
from dovetail_migrate.report import report_on
from dovetail_migrate.verl.compose import VERSIONS
from dovetail_migrate.verl.job import Job, job_of_command
from dovetail_migrate.verl.script import run_script
from dovetail_migrate.verl.translate import translate
from dovetail_migrate.verl.words import config_folder, read_command

ASIDE = re.compile(
    r"(?i)prepare|install|model_merge|server\.sh|submit_|get_train_args|ray_cluster|generation/|run_generation|run_eval|r1_distill|_proxy"
)
"""Scripts that start no training."""


def main() -> None:
    """Import every script of a verl checkout, print the counts of results, and write `results.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verl", type=Path)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--hydra", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", nargs=3, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = []
    roots = [arguments.verl / "examples", arguments.verl / "verl/experimental", arguments.recipe]
    for root in roots:
        base = arguments.recipe if root == arguments.recipe else arguments.verl
        os.chdir(base)
        for script in sorted(root.rglob("*.sh")):
            if ASIDE.search(str(script.relative_to(base))) or arguments.only not in str(script):
                continue
            results.append(one(script, base, arguments))
            print(
                json.dumps({k: results[-1].get(k) for k in ("script", "state", "why")})[:300],
                flush=True,
            )
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1, default=str))
    summary(results)


def one(script: Path, base: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Record a script's commands, import the last one that trains, check the config and compare it with verl's; return the result."""
    text = script.read_text(errors="replace")
    found: dict[str, Any] = {
        "script": str(script.relative_to(base.parent)),
        "npu": bool(
            re.search(r"(?i)npu|ascend", script.name + str(script.parent))
            or "trainer.device=npu" in text
            or "device=npu" in text.lower()
        ),
    }
    begun = time.perf_counter()
    commands, problem = record(script, arguments.out / "records")
    found["seconds_run"] = time.perf_counter() - begun
    training = [c for c in map(read_command, commands) if c is not None and c.trains]
    if not training:
        return found | {"state": "not recorded", "why": problem}
    begun = time.process_time()
    command = training[-1]
    try:
        places = [
            base,
            *[p for p in script.parents if p.is_relative_to(base)],
            arguments.verl,
            arguments.recipe,
        ]
        job = job_of_command(command, VERSIONS[0], places)
        draft = translate(job, rows=10_000)
    except DovetailError as error:
        return found | {"state": "no job", "why": str(error)}
    given = {key: (each.spelled, each.value) for key, each in job.given.items()}
    report = report_on(given, draft, [])
    found["seconds_import"] = time.process_time() - begun
    found["outcomes"] = Counter(each.outcome for each in report.keys)
    found["unneeded"] = [
        (each.key, str(each.value), each.why)
        for each in report.keys
        if each.outcome == "not needed"
    ]
    bad = [
        f"{each.outcome}: {each.line()}"
        for each in report.keys
        if each.outcome in ("refused", "unknown")
    ] + list(report.problems)
    if bad:
        return found | {"state": "refused", "why": bad}
    target = arguments.out / "configs" / (re.sub(r"\W+", "_", found["script"]) + ".yaml")
    target.parent.mkdir(exist_ok=True)
    target.write_text(draft.yaml(f"Imported from {found['script']}."))
    meant = json.dumps(yaml.safe_load(target.read_text()), sort_keys=True)
    state = arguments.out / "states" / f"{hashlib.sha256(meant.encode()).hexdigest()}.json"
    if state.exists():
        return found | json.loads(state.read_text())
    judged = judge(target, draft, job, places, arguments)
    state.parent.mkdir(exist_ok=True)
    if judged["state"] == "equal":
        state.write_text(json.dumps(judged))
    return found | judged


def judge(
    target: Path, draft: Draft, job: Job, places: list[Path], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Check an imported config in full, compare it with verl's own config, and return the result."""
    overrides = stand_ins(draft.values, arguments)
    # A stand-in's chat template takes no arguments.
    draft.values = {
        k: v for k, v in draft.values.items() if not k.startswith("data.chat_template_args")
    }
    checked = target.with_suffix(".checked.yaml")
    checked.write_text(draft.yaml("As checked."))
    try:
        loaded = load_config(checked, overrides)
        # An engine that is not installed here is a need of the machine.
        found = check(str(checked), overrides).errors
        errors = [str(e) for e in found if e.rule != "environment_missing"]
    except DovetailError as error:
        return {"state": "check fails", "why": [str(error), *getattr(error, "problems", ())]}
    if errors:
        return {"state": "check fails", "why": errors}
    own = hydras(job, places, arguments)
    if "error" in own:
        return {"state": "passes, and verl's Hydra refuses it", "why": own["error"]}
    differing = {
        k: (a, b)
        for k, a in verls_counts(own["values"], job).items()
        if not same(a, b := our_counts(loaded.config, job).get(k))
    }
    return {"state": "differs", "why": differing} if differing else {"state": "equal"}


def record(script: Path, cache: Path) -> tuple[list[list[str]], str]:
    """Run a script in the sandbox and return its commands; if the script lacks variables or arguments, run it again with them."""
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / (re.sub(r"\W+", "_", str(script)) + ".json")
    if file.exists():
        return json.loads(file.read_text())
    variables: dict[str, str] = {}
    words: list[str] = []
    for _ in range(12):
        run = run_script(script, words, variables)
        commands = [list(each) for each in run.commands]
        if any((c := read_command(each)) is not None and c.trains for each in commands):
            break
        if (name := re.search(r"line \d+: (\w+): (?:unbound variable|.*set)", run.errors)) and name[
            1
        ] not in variables:
            variables[name[1]] = "vllm" if "BACKEND" in name[1] else "given"
        elif "Usage" in run.errors and not words:
            words = ["8", "checkpoints"]
        else:
            break
    file.write_text(json.dumps([commands, run.errors[-300:]]))
    return commands, run.errors[-300:]


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template that renders tools and their results, as the models of jobs with tools have."""
_NOT_HERE = {
    "reward.function.path": "reward.function={{path: {reward}, attribute: compute_score}}",
    "data.source.file": "data.source=files",
    "data.prompt_key": "data.prompt_key=prompt",
    "data.messages_key": "data.messages_key=messages",
    "model.tokenizer_path": "model.tokenizer_path=null",
    "model.chat_template": "model.chat_template=null",
    "rollout.agent_loop.name": "rollout.agent_loop.tools=[calculator]",
}
"""Keys that name files of the job's own, and what the check has in their place."""


def stand_ins(values: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """Return config overrides that replace models, data and files that this machine lacks by ones that it has."""
    train, held_out, examples = arguments.rows
    if values.get("trainer.name") == "supervised":
        train = held_out = examples
    found = ["tracking=[console]", f"data.train_files={train}"]
    found += [f"data.val_files={held_out}"] if "data.val_files" in values else []
    for key, value in values.items():
        if key in ("model.path", "critic.path") or re.fullmatch(r"roles\.\w+\.path", key):
            experts = int(values.get("actor.engine.expert_parallel_size", 1)) > 1
            model = make_model(
                str(value), arguments.tokenizer, arguments.out / "models", experts=experts
            )
            found.append(f"{key}={model}")
    reward = arguments.out / "reward.py"
    reward.write_text(
        "def compute_score(solution_str, ground_truth):\n    return {'score': 0.0, 'acc': 0.0}\n"
    )
    for key, override in _NOT_HERE.items():
        if values.get(key):
            found.append(override.format(reward=reward))
    if values.get("critic.warmup_steps"):
        found.append("preflight.ignore=[warmup_too_long]")  # the stand-in has few rows
    if "rollout.agent_loop.name" in values:
        template = arguments.out / "tools.jinja"
        template.write_text(TEMPLATE)
        found.append(f"model.chat_template={template}")
    if values.get("reward.manager.model"):
        model = make_model(
            str(values["reward.manager.model"]), arguments.tokenizer, arguments.out / "models"
        )
        found.append(f"reward.manager.model={model}")
    return found


def hydras(job: Job, places: list[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a command's config as Hydra composes it from verl's files; keys that verl's newest config lacks are added with `++`."""
    assert job.command is not None
    configs, name = arguments.verl / "verl/trainer/config", job.config_name
    folder = config_folder(job.command, places)
    if folder is None or not (folder / f"{name}.yaml").is_file():
        folder = configs
    common = {"folder": str(folder), "searchpath": "" if folder == configs else str(configs), "name": name}  # fmt: skip
    plain = [override.text.removeprefix("--") for override in job.command.overrides]
    groups = ("engine", "optim", "model", "model_engine")
    forced = [
        text if text.partition("=")[0] in groups else "++" + text.lstrip("+") for text in plain
    ]
    done = subprocess.run(
        [arguments.hydra, str(Path(__file__).with_name("hydra_compose.py"))],
        input=json.dumps([common | {"overrides": given} for given in (plain, forced)]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr[-300:]}
    first, second = json.loads(done.stdout)
    return first if "values" in first else second


def verls_counts(values: dict[str, Any], job: Job) -> dict[str, Any]:
    """Return the quantities to compare, such as prompts per step, computed from verl's config."""

    def at(key: str, default: Any = None) -> Any:
        inner: Any = values
        for part in key.split("."):
            inner = inner.get(part) if isinstance(inner, dict) else None
        return default if inner is None else inner

    if job.finetunes:
        return {
            "prompts": at("data.train_batch_size"),
            "length": at("data.max_length"),
            "epochs": at("trainer.total_epochs"),
        }
    mini, actor = at("actor_rollout_ref.actor.ppo_mini_batch_size"), "actor_rollout_ref.actor"
    prompts = (
        mini * at("async_training.require_batches", 1)
        if at("async_training")
        else at("data.train_batch_size")
    )
    clip = at(f"{actor}.clip_ratio")
    return {
        "prompts": prompts,
        "samples": prompts * at("actor_rollout_ref.rollout.n", 1),
        "updates": math.ceil(prompts / min(mini, prompts)) * at(f"{actor}.ppo_epochs"),
        "prompt length": at("data.max_prompt_length"),
        "response length": at("data.max_response_length"),
        "KL in loss": at(f"{actor}.kl_loss_coef") if at(f"{actor}.use_kl_loss") else None,
        "KL in reward": at("algorithm.kl_ctrl.kl_coef")
        if at("algorithm.use_kl_in_reward")
        else None,
        "clip": [at(f"{actor}.clip_ratio_low", clip), at(f"{actor}.clip_ratio_high", clip)],
        "epochs": at("trainer.total_epochs"),
    }


def our_counts(config: Any, job: Job) -> dict[str, Any]:
    """Return the quantities to compare, as in `verls_counts`, from the imported config as Dovetail resolves it."""
    if job.finetunes:
        return {
            "prompts": config.data.train_batch_size,
            "length": getattr(config.data, "max_length", None),
            "epochs": config.trainer.total_epochs,
        }
    prompts, kl, loss = (
        config.data.train_batch_size,
        config.algorithm.kl,
        config.algorithm.policy_loss,
    )
    low, high = getattr(loss, "clip_low", "none"), getattr(loss, "clip_high", "none")
    return {
        "prompts": prompts,
        "samples": prompts * config.rollout.n,
        "updates": math.ceil(prompts / (config.actor.mini_batch_size or prompts))
        * config.actor.epochs,
        "prompt length": config.data.max_prompt_length,
        "response length": config.data.max_response_length,
        "KL in loss": kl.in_loss.coef if kl.in_loss else None,
        "KL in reward": kl.in_reward.coef if kl.in_reward else None,
        "clip": "none" if low == "none" else [low, high],
        "epochs": config.trainer.total_epochs,
    }


def same(verls: Any, ours: Any) -> bool:
    """Return whether two values mean the same. A lower clip of 1 or more equals a missing one; a loss without clipping matches any clip."""
    if isinstance(verls, list):
        if ours == "none":
            return True
        low, high = ours
        return (low is None or math.isclose(min(verls[0], 1.0), low)) and math.isclose(
            verls[1], high
        )
    if verls is None or ours is None:
        return verls == ours
    return math.isclose(float(verls), float(ours))


def summary(results: list[dict[str, Any]]) -> None:
    """Print the counts for all scripts, and for the scripts that need no NPU."""
    for title, chosen in (("all", results), ("without NPU", [r for r in results if not r["npu"]])):
        states = Counter(r["state"] for r in chosen)
        recorded = len(chosen) - states["not recorded"]
        print(
            f"{title}: {len(chosen)} scripts, {recorded} recorded ({recorded / len(chosen):.1%}); {dict(states)}"
        )
    unneeded = [each for r in results if not r["npu"] for each in r.get("unneeded", ())]
    print(f"forty of {len(unneeded)} keys that are not needed:")
    for key, value, why in random.Random(49).sample(unneeded, min(40, len(unneeded))):
        print(f"  {key} = {value}  ({why})")
    print(
        "seconds of one core beside the script's own:",
        round(sum(r.get("seconds_import", 0) for r in results) / len(results), 2),
        "mean,",
        round(max(r.get("seconds_import", 0) for r in results), 2),
        "most",
    )


if __name__ == "__main__":
    main()
