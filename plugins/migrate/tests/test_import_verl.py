"""`dovetail import verl`: the config and the report that it writes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.config import load_config
from dovetail.config.load import config_class_unrun

SEEDS = Path(__file__).parent / "seeds"
TRAIN = ("--", "python3", "-m", "verl.trainer.main_ppo")
FULL = "actor_rollout_ref"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that imports a command in an empty folder, and returns exit status, report by key, config or None, and output."""
    monkeypatch.chdir(tmp_path)

    def run(*words, options=()):
        done = CliRunner().invoke(main, ["import", "verl", "--json", *options, *words])
        if not isinstance(done.exception, SystemExit | None):
            raise done.exception
        found = json.loads(done.stdout) if done.stdout.startswith("{") else {"keys": []}
        keys = {each["key"]: each for each in found["keys"]}
        written = tmp_path / "config.yaml"
        config = (
            load_config(written, resolver=config_class_unrun).config if written.exists() else None
        )
        return done.exit_code, keys, config, found, done.output

    return run


@pytest.mark.parametrize("name", ["ppo_config", "grpo_config", "reward_and_lora", "megatron", "reward_section"])  # fmt: skip
def test_configs_of_pages_on_verl_import(run, name):
    status, keys, config, _, output = run(str(SEEDS / f"{name}.yaml"))
    assert status == 0, output
    assert config is not None
    assert not [key for key, each in keys.items() if each["outcome"] in ("refused", "unknown")]


def test_spellings_of_several_pages_mean_the_same(run):
    _, _, config, _, _ = run(str(SEEDS / "reward_and_lora.yaml"))
    assert config.actor.engine.lora.rank == 16
    assert config.actor.engine.lora.target_modules == ("q_proj", "v_proj", "k_proj", "o_proj")
    assert (config.rollout.quantization, config.rollout.tensor_parallel_size) == ("fp8", 2)
    assert (config.reward.function.attribute, config.reward.manager.name) == ("compute_reward", "naive")  # fmt: skip
    assert config.algorithm.rollout_correction.weights == "token"


def test_absent_keys_have_verls_values(run):
    _, _, config, _, _ = run(*TRAIN, "algorithm.adv_estimator=gae")
    assert (config.data.train_batch_size, config.rollout.n) == (1024, 1)
    assert (config.data.max_prompt_length, config.trainer.total_epochs) == (512, 30)
    assert config.actor.mini_batch_size == 256
    assert config.algorithm.advantage.name == "gae"


def test_a_penalty_that_is_off_stays_off(run):
    given = (f"{FULL}.actor.kl_loss_coef=0.1", "algorithm.kl_ctrl.kl_coef=0.2", "algorithm.adv_estimator=gae")  # fmt: skip
    _, keys, config, _, _ = run(*TRAIN, *given)
    assert config.algorithm.kl.in_loss is None
    assert config.algorithm.kl.in_reward is None
    assert {keys[key.partition("=")[0]]["outcome"] for key in given[:2]} == {"not needed"}


def test_penalties_that_are_on_have_verls_coefficients(run):
    given = (f"{FULL}.actor.use_kl_loss=True", f"{FULL}.actor.kl_loss_coef=0.1", f"{FULL}.actor.kl_loss_type=mse")  # fmt: skip
    reward = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.adv_estimator=gae")  # fmt: skip
    _, _, config, _, _ = run(*TRAIN, *given, *reward)
    assert (config.algorithm.kl.in_loss.coef, config.algorithm.kl.in_loss.estimator) == (0.1, "k2")
    assert config.algorithm.kl.in_reward.controller.name == "adaptive"


def test_clip_ratio_alone_has_no_effect_in_verl_and_none_here(run):
    _, keys, config, _, _ = run(
        *TRAIN, f"{FULL}.actor.clip_ratio=0.1", "algorithm.adv_estimator=gae"
    )
    assert config.algorithm.policy_loss.clip_low == 0.2
    assert keys[f"{FULL}.actor.clip_ratio"]["outcome"] == "not needed"


def test_of_a_key_given_twice_the_last_wins_and_the_report_says_so(run):
    _, _, config, found, _ = run(*TRAIN, "data.train_batch_size=512", "data.train_batch_size=768", "algorithm.adv_estimator=gae")  # fmt: skip
    assert config.data.train_batch_size == 768
    assert any("512" in note and "768" in note for note in found["notes"])


def test_a_refused_key_writes_nothing_unless_a_part_is_asked_for(run):
    words = (*TRAIN, "trainer.device=npu", "algorithm.adv_estimator=gae")
    status, keys, config, _, output = run(*words)
    assert (status, config) == (2, None)
    assert keys["trainer.device"]["outcome"] == "refused"
    assert "--partial" in output
    status, _, config, _, _ = run(*words, options=("--partial",))
    assert status == 0
    assert config is not None


def test_an_unknown_key_is_an_error_with_the_nearest_name(run):
    status, keys, config, _, _ = run(*TRAIN, "data.train_batchsize=8")
    assert (status, config) == (2, None)
    assert keys["data.train_batchsize"]["outcome"] == "unknown"
    assert "data.train_batch_size" in keys["data.train_batchsize"]["why"]


def test_a_key_of_another_version_is_named_with_it(run):
    key = f"{FULL}.actor.router_replay.record_file"
    _, keys, _, _, _ = run(*TRAIN, f"+{key}=x")
    assert "0.8.0" in keys[key]["why"] or keys[key]["outcome"] == "not needed"
    status, _, config, _, _ = run(*TRAIN, "algorithm.adv_estimator=gae", options=("--version", "0.8.0"))  # fmt: skip
    assert status == 0
    assert config is not None


def test_two_engines_at_once_are_refused(run):
    given = ("algorithm.adv_estimator=gae", "critic.strategy=megatron")
    status, keys, _, _, _ = run(*TRAIN, *given)
    assert status == 2
    assert "two engines" in keys["critic.strategy"]["why"]


def test_an_interpolation_that_refers_to_nothing_is_one_error(run):
    status, _, config, _, output = run(*TRAIN, "data.train_batch_size=${data.nothing}")
    assert (status, config) == (2, None)
    assert "data.nothing" in output
    assert "Traceback" not in output


def test_an_expert_layout_that_does_not_fit_gets_a_proposal(run):
    megatron = f"{FULL}.actor.megatron"
    layout = (f"{megatron}.tensor_model_parallel_size=2", f"{megatron}.pipeline_model_parallel_size=2", f"{megatron}.expert_model_parallel_size=8")  # fmt: skip
    _, keys, config, _, _ = run(*TRAIN, "model_engine=megatron", *layout, "algorithm.adv_estimator=gae")  # fmt: skip
    engine = config.actor.engine
    assert (engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.expert_parallel_size) == (2, 1, 4)  # fmt: skip
    assert keys[f"{megatron}.expert_model_parallel_size"]["outcome"] == "changed"


def test_counts_of_the_fully_asynchronous_program_are_its_own(run):
    words = ("--", "python3", "-m", "verl.experimental.fully_async_policy.fully_async_main")
    given = (f"{FULL}.actor.ppo_mini_batch_size=32", "async_training.require_batches=4", "async_training.staleness_threshold=0.5", "rollout.total_rollout_steps=51200", f"{FULL}.rollout.n=8", "algorithm.adv_estimator=grpo")  # fmt: skip
    _, _, config, _, _ = run(*words, *given)
    assert (config.data.train_batch_size, config.actor.mini_batch_size) == (128, 32)
    assert (config.trainer.name, config.trainer.sync_every, config.trainer.max_staleness) == ("streaming", 4, 1)  # fmt: skip
    assert (config.trainer.over_sampling, config.trainer.total_steps) == (6.0, 400)
    assert set(config.runtime.pools) == {"train", "generate"}


def test_one_step_off_is_streaming_of_one_version(run):
    words = ("--", "python3", "-m", "verl.experimental.one_step_off_policy.main_ppo")
    _, _, config, _, _ = run(*words, "algorithm.adv_estimator=grpo", f"{FULL}.rollout.n=8")
    assert (config.trainer.name, config.trainer.max_staleness, config.trainer.on_sync) == ("streaming", 1, "drain")  # fmt: skip


def test_warm_up_counts_optimizer_steps_here(run):
    given = ("data.train_batch_size=512", f"{FULL}.actor.ppo_mini_batch_size=32", f"{FULL}.actor.optim.lr_warmup_steps=10", "algorithm.adv_estimator=gae")  # fmt: skip
    _, keys, config, _, _ = run(*TRAIN, *given)
    assert config.actor.optim.warmup_steps == 160
    assert keys[f"{FULL}.actor.optim.lr_warmup_steps"]["outcome"] == "changed"
    ratio = (*given[:2], f"{FULL}.actor.optim.lr_warmup_steps_ratio=0.1", "algorithm.adv_estimator=gae", "trainer.total_epochs=1")  # fmt: skip
    assert run(*TRAIN, *ratio)[0] == 2
    _, _, config, _, _ = run(*TRAIN, *ratio, options=("--rows", "51200"))
    assert config.actor.optim.warmup_steps == 10 * 16


def test_a_config_of_the_users_with_a_defaults_list_lies_over_verls(run, tmp_path):
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "hydra:\n  searchpath: [pkg://verl.trainer.config]\ndefaults: [ppo_trainer, _self_]\n"
        f"data: {{train_batch_size: 64}}\n{FULL}:\n  actor: {{ppo_mini_batch_size: 64}}\nalgorithm: {{adv_estimator: gae}}\n"
    )
    _, keys, config, _, _ = run(*TRAIN, "--config-path", "config", "--config-name", "mine", "data.max_prompt_length=99")  # fmt: skip
    assert (config.data.train_batch_size, config.data.max_prompt_length) == (64, 99)
    assert set(keys) == {"data.train_batch_size", f"{FULL}.actor.ppo_mini_batch_size", "algorithm.adv_estimator", "data.max_prompt_length"}  # fmt: skip


def test_words_without_a_command_are_the_arguments_alone(run):
    _, _, config, _, _ = run("--", "data.train_batch_size=2048", "algorithm.adv_estimator=gae", options=("--arguments-only",))  # fmt: skip
    assert config.data.train_batch_size == 2048


def test_a_command_that_does_not_train_names_the_one_here(run):
    words = "python -m verl.model_merger merge --backend fsdp --local_dir a/actor --target_dir b"
    status, _, config, _, output = run("--", *words.split())
    assert (status, config) == (0, None)
    assert "dovetail export a/actor b" in output


def test_what_is_no_command_of_verls_is_an_error(run):
    status, _, _, _, output = run("--", "echo", "hello")
    assert status == 2
    assert "verl.trainer.main_ppo" in output


def test_a_script_says_what_it_may_do_and_its_command_imports(run):
    status, keys, config, _, output = run("--", "bash", str(SEEDS / "launch.sh"), "data.seed=7")
    if status == 2 and "can't sandbox" in output:
        pytest.skip("no level of the sandbox that runs scripts holds here")
    assert status == 0, output
    assert "no network" in output
    assert (config.seed, config.data.train_batch_size, config.rollout.n) == (7, 16, 5)
    assert [each.name for each in config.tracking] == ["console", "mlflow", "jsonl"]
    assert keys[f"{FULL}.rollout.trace.backend"]["outcome"] == "not needed"


def test_a_chosen_group_does_not_vouch_for_keys_below_its_name(run):
    words = "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer engine=fsdp optim=fsdp +optim.lrr=1 engine.fsdp_sise=2"
    status, keys, _, _, _ = run("--", *words.split())
    assert status == 2
    assert {key for key, each in keys.items() if each["outcome"] == "unknown"} == {"optim.lrr", "engine.fsdp_sise"}  # fmt: skip


def test_self_play_with_one_sample_a_prompt_is_refused(run):
    words = f"python3 -m recipe.sppo.main_sppo --config-path={SEEDS}/recipes --config-name=sppo_trainer {FULL}.rollout.n=1"
    status, keys, _, _, _ = run("--", *words.split())
    assert (status, keys[f"{FULL}.rollout.n"]["outcome"]) == (2, "refused")


def test_an_adapter_that_training_begins_with_brings_its_rank_and_layers(run, tmp_path):
    given = ("algorithm.adv_estimator=gae", f"{FULL}.model.lora_adapter_path=saved", f"{FULL}.model.exclude_modules=.*visual.*")  # fmt: skip
    _, keys, _, _, _ = run(*TRAIN, *given)
    assert "adapter_config.json" in keys[f"{FULL}.model.lora_adapter_path"]["why"]
    (tmp_path / "saved").mkdir()
    saved = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (tmp_path / "saved" / "adapter_config.json").write_text(json.dumps(saved))
    _, keys, config, _, _ = run(*TRAIN, *given)
    lora = config.actor.engine.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 16, ("q_proj",))
    assert (lora.adapter_path, lora.exclude_modules) == ("saved", ".*visual.*")
    assert keys[f"{FULL}.model.lora_adapter_path"]["outcome"] == "mapped"


def test_what_another_engine_divides_is_said_to_be_shared_by_all_ranks(run):
    words = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer engine=automodel optim=automodel engine.ep_size=8 engine.tp_size=1 data.messages_key=chat data.val_max_samples=9"
    status, keys, config, _, output = run("--", *words.split())
    assert status == 0, output
    assert config.data.messages_key == "chat"
    outcomes = {key: each["outcome"] for key, each in keys.items()}
    assert outcomes["engine.ep_size"] == outcomes["data.val_max_samples"] == "changed"
    assert outcomes["engine.tp_size"] == "not needed"


@pytest.mark.parametrize(
    ("engine", "key", "ours", "proposed"),
    [
        ("dp", "rollout.tensor_model_parallel_size", "rollout.tensor_parallel_size", 2),
        ("dp", "actor.ulysses_sequence_parallel_size", "actor.engine.sequence_parallel_size", 2),
        ("megatron", "actor.megatron.tensor_model_parallel_size", "actor.engine.tensor_parallel_size", 2),
        ("megatron", "actor.megatron.expert_model_parallel_size", "actor.engine.expert_parallel_size", 4),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_the_model_get_a_proposal(run, tmp_path, engine, key, ours, proposed):  # fmt: skip
    (tmp_path / "model").mkdir()
    shape = {"num_attention_heads": 14, "num_key_value_heads": 2, "num_experts": 12}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"text_config": shape}))
    given = ("algorithm.adv_estimator=gae", f"model_engine={engine}", f"{FULL}.{key}=8")
    _, keys, config, _, output = run(*TRAIN, *given, f"{FULL}.model.path=model")
    assert config is not None, output
    value = config
    for part in ours.split("."):
        value = getattr(value, part)
    assert value == proposed
    assert keys[f"{FULL}.{key}"]["outcome"] == "changed"
    # Without the model on this machine, its number of heads is unknown.
    _, keys, _, _, _ = run(*TRAIN, *given, f"{FULL}.model.path=org/elsewhere")
    assert keys[f"{FULL}.{key}"]["outcome"] == "mapped"


def test_a_dataset_class_is_read_by_the_shims_source(run):
    pytest.importorskip("dovetail_verl_shim")
    given = ("algorithm.adv_estimator=gae", "data.custom_cls.path=rows.py", "data.custom_cls.name=Rows")  # fmt: skip
    _, _, config, _, output = run(*TRAIN, *given)
    assert config is not None, output
    source = config.data.source
    assert (source.name, source.file, source.class_name) == ("verl", "rows.py", "Rows")


def test_on_several_nodes_the_report_names_the_choices(run):
    _, _, _, found, _ = run(*TRAIN, "algorithm.adv_estimator=gae", "trainer.nnodes=4")
    notes = " ".join(found["notes"])
    assert "shard_size=8" in notes


@pytest.mark.parametrize("word", ["nothere.sh", "nothere.yaml"])
def test_a_file_that_is_not_there_is_named_and_nothing_else_is_said(run, word):
    status, _, _, _, output = run(word)
    assert status == 2
    assert word in output
    assert "sandbox" not in output
