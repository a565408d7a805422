#!/usr/bin/env bash
set -o errexit -o nounset -o pipefail
RAY_ADDRESS="${RAY_ADDRESS:-http://localhost:8265}"
RUNTIME_ENV='{"env_vars": {"TRACKING": "sqlite:////data/runs.db"}}'
batch=$((4 * 4))
extra=(trainer.critic_warmup=0 "trainer.logger=[\"console\", \"mlflow\"]")
ray job submit \
    --address="${RAY_ADDRESS}" \
    --runtime-env-json="${RUNTIME_ENV}" \
    -- python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="~/data/sums/train.parquet" \
    data.val_files="~/data/sums/test.parquet" \
    data.train_batch_size=${batch} \
    data.max_prompt_length=512 data.max_response_length=1024 \
    data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.trace.backend=mlflow \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=5 \
    "${extra[@]}" "$@" 2>&1 | tee launch.log
