"""`dovetail import trl`: TRL's configs of Python files, which are not run, and of YAML."""

import json

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.config import load_config

GRPO = '''
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("a file that is read must not run")
STEPS = 4


def short(completions, **kwargs):
    return [-len(each) for each in completions]


args = GRPOConfig(
    output_dir="out", learning_rate=2e-6, num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=STEPS,
    steps_per_generation=8, num_iterations=2, epsilon_high=0.28, beta=0.04, loss_type="dr_grpo", max_completion_length=256, max_steps=400, temperature=0.9,
    use_vllm=True, scale_rewards=False, report_to="wandb", mask_truncated_completions=True,
)
trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=short, args=args, train_dataset=load("x"), peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj"]))
trainer.train()
'''  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that imports a file's text, and returns exit status, report by key, config or None, and output."""
    monkeypatch.chdir(tmp_path)

    def run(text, name="train.py", *options):
        (tmp_path / name).write_text(text)
        done = CliRunner().invoke(main, ["import", "trl", "--json", *options, name])
        found = json.loads(done.stdout) if done.stdout.startswith("{") else {"keys": []}
        written = tmp_path / "config.yaml"
        config = load_config(written).config if written.exists() else None
        return done.exit_code, {each["key"]: each for each in found["keys"]}, config, done.output

    return run


def test_a_python_file_is_read_and_not_run(run):
    status, keys, config, output = run(GRPO)
    assert status == 0, output
    assert (config.model.path, config.rollout.name, config.rollout.n) == ("Qwen/Qwen3-0.6B", "vllm", 8)  # fmt: skip
    # 16 × 8 completions are 16 prompts with 8 responses each: two updates of 8 prompts, in two epochs.
    assert (config.data.train_batch_size, config.actor.mini_batch_size, config.actor.epochs) == (16, 8, 2)  # fmt: skip
    assert config.trainer.total_steps == 100
    assert (config.algorithm.kl.in_loss.coef, config.algorithm.advantage.norm_by_std) == (0.04, False)  # fmt: skip
    loss = config.algorithm.policy_loss
    assert (loss.clip_low, loss.clip_high, loss.dual_clip) == (0.2, 0.28, None)
    assert (config.algorithm.loss_aggregation.name, config.algorithm.loss_aggregation.length) == ("seq_mean_token_sum_norm", 256)  # fmt: skip
    assert (config.actor.engine.lora.rank, config.actor.engine.lora.alpha) == (16, 32)
    # The file starts a training when it is imported, so it is not used as the reward's file.
    assert config.reward.function is None
    assert "short" in keys["trainer.reward_funcs"]["why"]
    assert config.algorithm.sample_filters[0].name == "overlong"
    assert keys["max_steps"]["outcome"] == "changed"


def test_batches_are_those_of_all_processes(run):
    _, _, config, _ = run(GRPO, "train.py", "--processes", "4")
    assert (config.data.train_batch_size, config.actor.mini_batch_size) == (64, 32)


def test_a_value_that_is_no_literal_is_refused_with_its_source(run):
    status, keys, config, output = run("from trl import GRPOConfig\nGRPOConfig(beta=float(open('b').read()))\n")  # fmt: skip
    assert (status, config) == (2, None)
    assert "open('b')" in keys["beta"]["why"]
    assert "Traceback" not in output


@pytest.mark.parametrize("text", ["x = 1\n", "from trl import *\nGRPOConfig()\nSFTConfig()\n", "def (:\n"])  # fmt: skip
def test_a_file_without_one_config_is_an_error(run, text):
    status, _, config, output = run(text)
    assert (status, config) == (2, None)
    assert "train.py" in output


def test_an_unknown_field_is_named_with_the_nearest(run):
    _, keys, config, _ = run("num_generation: 4\nmax_completion_length: 64\n", "c.yaml")
    assert config is None
    assert "num_generations" in keys["num_generation"]["why"]


def test_a_group_that_batches_cut_is_refused_as_trl_does(run):
    status, _, _, output = run("num_generations: 6\nmodel_name_or_path: m\n", "c.yaml")
    assert status == 2
    assert "num_generations = 6" in output


@pytest.mark.parametrize(
    ("loss", "found"),
    [("sigmoid", ("dpo", "logistic")), ("apo_zero", ("dpo", "apo_zero")), ("exo_pair", ("dpo", "exo")), ("ipo", ("ipo", ""))],
)  # fmt: skip
def test_losses_of_preferences_have_their_names_here(run, loss, found):
    text = f"beta: 0.3\nmodel_name_or_path: m\nloss_type: {loss}\nlabel_smoothing: 0.001\ntruncation_mode: keep_end\n"
    status, keys, config, output = run(text if loss != "apo_zero" else text.replace("0.001", "0.0"), "c.yaml")  # fmt: skip
    assert status == 0, output
    objective = config.actor.objective
    assert (objective.name, getattr(objective, "loss", "")) == found
    assert objective.beta == 0.3
    assert (config.trainer.examples, config.data.overlong_prompts) == ("preferences", "filter")
    assert keys["truncation_mode"]["outcome"] == "changed"


def test_an_adapter_without_values_has_pefts_own(run):
    _, _, config, _ = run('from trl import SFTConfig\nfrom peft import LoraConfig\nSFTTrainer(model="m", args=SFTConfig(), peft_config=LoraConfig(lora_dropout=0))\n')  # fmt: skip
    lora = config.actor.engine.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 8.0, ("q_proj", "v_proj"))
    _, keys, config, _ = run("model_name_or_path: m\nlora_r: 4\n", "off.yaml")
    assert config.actor.engine.lora is None
    assert "use_peft" in keys["lora_r"]["why"]
