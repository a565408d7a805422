"""Keys of verl's: what a person who pastes them is told."""

from __future__ import annotations

import pytest

from dovetail.config.aliases import foreign_advice, verl_advice
from dovetail.config.keys import parse_path


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("critic.cliprange_value", "critic.value_clip"),
        ("critic.ppo_mini_batch_size", "critic.mini_batch_size"),
        ("critic.model.path", "critic.path"),
        ("critic.optim.lr_warmup_steps", "critic.optim.warmup_steps"),
        ("critic.ppo_micro_batch_size_per_gpu", "critic.max_tokens_per_micro_batch"),
        ("trainer.critic_warmup", "critic.warmup_steps"),
        ("algorithm.gamma", "algorithm.advantage.gamma"),
        ("algorithm.lam", "algorithm.advantage.lam"),
        ("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage.norm_by_std"),
        ("algorithm.use_kl_in_reward", "algorithm.kl.in_reward"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl.in_reward.coef"),
        ("algorithm.kl_ctrl.target_kl", "algorithm.kl.in_reward.controller.target"),
        ("algorithm.filter_groups.enable", "algorithm.sample_filters"),
        ("algorithm.filter_groups.max_num_gen_batches", "algorithm.max_generation_rounds"),
        ("algorithm.rollout_is_threshold", "algorithm.rollout_correction.weight_upper"),
        ("algorithm.rollout_correction.rollout_rs", "algorithm.rollout_correction.reject[0].by"),
        ("reward_model.overlong_buffer.len", "algorithm.overlong_penalty.buffer"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", "algorithm.overlong_penalty.factor"),
        ("actor_rollout_ref.actor.clip_ratio_c", "algorithm.policy_loss.dual_clip"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p", "rollout.validation.top_p"),
        ("trainer.test_freq", "trainer.validate_every"),
        ("actor_rollout_ref.actor.lora.r", "actor.engine.lora.rank"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space", "rollout.engine_args"),
        ("actor_rollout_ref.rollout.max_num_seqs", "rollout.max_num_seqs"),
        ("actor_rollout_ref.rollout.online_quant", "rollout.quantization"),
        ("ray_kwargs.timeline_json_file", "runtime.timeline"),
        ("ray_kwargs.ray_init.num_cpus", "runtime.ray_init"),
        ("async_training.staleness_threshold", "trainer.over_sampling"),
        ("async_training.trigger_parameter_sync_step", "trainer.sync_every"),
        ("async_training.partial_rollout", "trainer.on_sync"),
        ("data.apply_chat_template_kwargs", "data.chat_template_args"),
        ("data.apply_chat_template_kwargs.enable_thinking", "data.chat_template_args"),
        ("reward_model.model.path", "reward.manager.model"),
        ("reward.reward_model.sandbox_fusion.url", "reward.function.service"),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage", "actor.engine.last_stage_layers"),
    ],
)  # fmt: skip
def test_a_key_of_verls_leads_to_dovetails(theirs, ours):
    advice = verl_advice(parse_path(theirs))
    assert advice is not None
    assert advice.startswith(f"this is verl's key; Dovetail's is {ours}")
    assert advice.removeprefix(f"this is verl's key; Dovetail's is {ours}")[:1] in ("", " ")


def test_a_key_that_dovetail_needs_none_for_is_to_be_left_out():
    advice = verl_advice(parse_path("actor_rollout_ref.actor.use_dynamic_bsz"))
    assert advice == "this is verl's key; leave it out: micro-batches are always cut by tokens"


def test_a_key_of_hydras_is_to_be_left_out():
    for key in (
        "actor_rollout_ref.actor._target_",
        "algorithm._target_",
        "hydra.searchpath",
        "defaults",
    ):
        assert foreign_advice(parse_path(key)) == "this is Hydra's key; leave it out"


def test_a_key_that_both_have_needs_no_advice():
    assert verl_advice(parse_path("critic.optim.lr")) is None


def test_keys_of_a_section_whose_plugin_was_not_chosen_are_explained_all_the_same(problems):
    found = problems({"algorithm": {"rollout_correction": {"rollout_is_threshold": 2.0}}})
    assert any("selects no plugin" in problem for problem in found)
    assert any("Dovetail's is algorithm.rollout_correction.weight_upper" in problem for problem in found)  # fmt: skip


@pytest.mark.parametrize(
    "key",
    [
        "rollout.tensor_parallel_size",  # another engine's than the one that is chosen
        "rollout.stop",
        "rollout.n",
        "rollout.gpu_memory_utilization",
        "model.path",
        "actor.optim.eps",
        "model.revision",
    ],
)
def test_a_key_that_both_have_under_verls_prefix_leads_to_the_one_without(problems, key):
    (problem,) = problems(None, f"actor_rollout_ref.{key}=1")
    assert problem.endswith(f": this is verl's key; Dovetail's is {key}")


def test_a_key_of_an_installed_plugin_that_is_not_chosen_leads_to_its_name(problems):
    (problem,) = problems(None, "trainer.on_sync=abort")
    assert problem.endswith("unknown key; another plugin has it: set trainer.name=streaming")


def test_a_key_that_a_plugin_of_a_file_lacks_does_not_lead_to_another_plugin(problems, tmp_path):
    (tmp_path / "loop.py").write_text(
        "from dovetail.interfaces import AgentLoop\n\n\nclass Loop(AgentLoop):\n    name = 'loop'\n    api = '>=1.0,<2'\n\n"
        "    async def run(self, session): ...\n"
    )
    loop = f"rollout.agent_loop={{path: {tmp_path}/loop.py, attribute: Loop}}"
    for key, fact in (("max_turns", "dovetail.sections.EpisodeSection"), ("tools", "unknown key")):
        (problem,) = problems(None, loop, f"rollout.agent_loop.{key}=3")
        assert fact in problem
        assert "tool_agent" not in problem
    (problem,) = problems(None, "rollout.agent_loop.max_turns=3")
    assert problem.endswith("set rollout.agent_loop.name=tool_agent")


def test_unknown_keys_of_several_layers_are_each_told_with_theirs(problems, load):
    given = ("actor_rollout_ref.rollout.odd=1", "actor_rollout_ref.actor.odder=2")
    found = problems(None, *given, "actor_rollout_ref.rollout.oddest=3")
    assert [problem.partition(" ")[0] for problem in found] == [
        "actor_rollout_ref.rollout.odd",
        "actor_rollout_ref.rollout.oddest",
        "actor_rollout_ref.actor.odder",
    ]
    for problem in found:
        assert f"'{problem.partition(' ')[0]}=" in problem
    assert len(problems({"actor_rollout_ref": {"nothing": {"odd": 1, "odder": 2}}})) == 1
    assert len(problems({"async_training": {"odd": 1, "odder": 2}})) == 1
    (problem,) = problems(None, "async_training.odd=1", "async_training.odder=2")
    assert "override #1 'async_training.odd=1', override #2 'async_training.odder=2'" in problem


def test_a_misspelt_section_is_told_once_with_every_layer_that_gives_it(problems):
    (problem,) = problems(None, *(f"trainr.key_{number}=1" for number in range(5)))
    assert problem.startswith("trainr (override #1 'trainr.key_0=1', override #2 ")
    assert problem.endswith(", and 2 more): unknown key; did you mean trainer?")
