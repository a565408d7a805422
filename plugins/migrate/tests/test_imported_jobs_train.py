"""Imported jobs, made small, train three steps on a CPU, so that the imported config is known to run."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from dovetail import train
from dovetail.cli.main import main

pytestmark = pytest.mark.nightly
SEEDS = Path(__file__).parent / "seeds"
PPO = "python3 -m verl.trainer.main_ppo"
A = "actor_rollout_ref"
GROUPS = f"algorithm.adv_estimator=grpo {A}.rollout.n=4 {A}.rollout.name=vllm"
VERL = {
    "ppo": f"{PPO} algorithm.adv_estimator=gae {A}.rollout.name=vllm",
    "ppo_kl_in_reward": f"{PPO} algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True {A}.rollout.name=vllm",
    "grpo": f"{PPO} {GROUPS} {A}.actor.use_kl_loss=True",
    "dr_grpo": f"{PPO} {GROUPS} algorithm.norm_adv_by_std_in_grpo=False {A}.actor.loss_agg_mode=seq-mean-token-sum-norm",
    "rloo": f"{PPO} algorithm.adv_estimator=rloo {A}.rollout.n=4",
    "reinforce_plus_plus": f"{PPO} algorithm.adv_estimator=reinforce_plus_plus {A}.rollout.n=4",
    "remax": f"{PPO} algorithm.adv_estimator=remax {A}.rollout.n=1",
    "opo": f"{PPO} algorithm.adv_estimator=opo {A}.rollout.n=4",
    "gpg": f"{PPO} algorithm.adv_estimator=gpg {A}.rollout.n=4 {A}.actor.policy_loss.loss_mode=gpg",
    "gspo": f"{PPO} {GROUPS} {A}.actor.policy_loss.loss_mode=gspo {A}.actor.clip_ratio_low=0.0003 {A}.actor.clip_ratio_high=0.0004",
    "cispo": f"{PPO} {GROUPS} {A}.actor.policy_loss.loss_mode=cispo {A}.actor.clip_ratio_low=10 {A}.actor.clip_ratio_high=0.2",
    "clip_cov": f"{PPO} {GROUPS} {A}.actor.policy_loss.loss_mode=clip_cov",
    "dapo": f"{PPO} {GROUPS} {A}.actor.clip_ratio_high=0.28 algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc algorithm.filter_groups.max_num_gen_batches=2",
    "rollout_correction": f"{PPO} {GROUPS} algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_rs=seq_mean_k1 algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
    "lora": f"{PPO} {GROUPS} {A}.model.lora_rank=8 {A}.model.lora_alpha=16",
    "one_step_off": f"python3 -m verl.experimental.one_step_off_policy.main_ppo {GROUPS}",
    "fully_async": f"python3 -m verl.experimental.fully_async_policy.fully_async_main {GROUPS} {A}.actor.ppo_mini_batch_size=4 async_training.require_batches=2 async_training.staleness_threshold=1",
    "distillation": f"{PPO} {GROUPS} distillation.enabled=True distillation.teacher_models.teacher_model.model_path=TEACHER distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True distillation.distillation_loss.use_task_rewards=False",
    "spin": f"python3 -m recipe.spin.main_spin --config-path={SEEDS}/recipes --config-name=spin_trainer {A}.rollout.n=2",
    "sppo": f"python3 -m recipe.sppo.main_sppo --config-path={SEEDS}/recipes --config-name=sppo_trainer {A}.rollout.n=4",
    "prime": f"python3 -m recipe.prime.main_prime --config-path={SEEDS}/recipes --config-name=prime_trainer {A}.rollout.n=4 algorithm.use_kl_in_reward=True",
    "tools": f"{PPO} {GROUPS} {A}.rollout.multi_turn.enable=True {A}.rollout.multi_turn.max_assistant_turns=2 {A}.rollout.multi_turn.tool_config_path=tools.yaml",
    "sft": "torchrun --nproc_per_node=1 -m verl.trainer.sft_trainer optim.lr=1e-4 trainer.total_epochs=1",
}  # fmt: skip
SMALL = (
    "model.dtype=float32", "data.train_batch_size=8", "actor.engine=fsdp2", "runtime=inline", "tracking=[jsonl]", "trainer.total_steps=3",
    "trainer.validate_before=false", "trainer.validate_after=false", "trainer.export=none", "data.val_files=[]",
)  # fmt: skip
OF_ROLLOUTS = ("rollout=hf", "rollout.offload=false", "data.max_prompt_length=16", "data.max_response_length=8", "actor.mini_batch_size=4")  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The demo's untrained model and sums, with examples for fine-tuning."""
    data = pytest.importorskip("dovetail_demo.data", reason="needs dovetail-demo")
    model = pytest.importorskip("dovetail_demo.model")
    folder = tmp_path_factory.mktemp("base")
    model.make_base(folder / "model", 1, 64)
    data.make_data(folder, 1)
    examples = [{"prompt": "1+1=?", "response": "1+1=2"}] * 64
    pq.write_table(pa.Table.from_pylist(examples), folder / "examples.parquet")
    pairs = [{"prompt": "1+1=?", "chosen": "1+1=2", "rejected": "1+1=3"}] * 64
    pq.write_table(pa.Table.from_pylist(pairs), folder / "pairs.parquet")
    return folder


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_TOOLS = ("rollout.agent_loop.tools=[calculator]", "model.chat_template=tools.jinja", "data.max_prompt_length=64")  # fmt: skip


def shortened(base: Path, rows: str, *more: str) -> dict:
    """Train the imported config for three steps on a tiny model."""
    overrides = [*SMALL, f"model.path={base}/model", f"data.train_files={base}/{rows}", *more]
    return train("config.yaml", overrides)


@pytest.mark.parametrize("name", VERL)
def test_an_imported_job_trains(name, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tools.jinja").write_text(TEMPLATE)
    done = CliRunner().invoke(main, ["import", "verl", "--", *VERL[name].split()])
    assert done.exit_code == 0, done.output
    own = {"distillation": [f"roles.teacher.path={base}/model"], "tools": WITH_TOOLS}.get(name, ())
    if name == "sft":
        result = shortened(base, "examples.parquet", "data.max_length=64")
    else:
        result = shortened(base, "train.parquet", *OF_ROLLOUTS, *own)
    assert result["steps"] == 3, result


@pytest.mark.parametrize("seed", [path.name for path in sorted((SEEDS / "trl").iterdir())])
def test_a_job_of_trl_trains(seed, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["import", "trl", str(SEEDS / "trl" / seed)])
    assert done.exit_code == 0, done.output
    rows, more = {"g": ("train.parquet", ("data.max_prompt_length=16", "data.max_response_length=8")),
                  "d": ("pairs.parquet", ()), "s": ("examples.parquet", ())}[seed[0]]  # fmt: skip
    result = shortened(base, rows, *more, "data.train_batch_size=4", "data.max_length=" + ("null" if more else "64"))  # fmt: skip
    assert result["steps"] == 3, result


@pytest.mark.parametrize("seed", [path.name for path in sorted(SEEDS.glob("*.yaml"))])
def test_a_config_of_a_page_on_verl_trains(seed, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tools.jinja").write_text(TEMPLATE)
    done = CliRunner().invoke(main, ["import", "verl", str(SEEDS / seed)])
    assert done.exit_code == 0, done.output
    more = WITH_TOOLS if seed == "reward_section.yaml" else ()
    off = ("reward.function=null", "reward.manager=naive", "critic.path=null")
    result = shortened(base, "train.parquet", *OF_ROLLOUTS, *more, *off)
    assert result["steps"] == 3, result
