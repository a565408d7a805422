"""GRPO with an adapter, as jobs of TRL's are written: one file with reward, data, config and trainer."""

import re

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def correct(completions, answer, **kwargs):
    found = [re.findall(r"-?\d+", text)[-1:] for text in completions]
    return [float(numbers == [right]) for numbers, right in zip(found, answer, strict=True)]


def main():
    config = GRPOConfig(
        output_dir="outputs/grpo-sums",
        run_name="grpo-sums",
        learning_rate=1e-5,
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.1,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=1,
        bf16=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=200,
        num_train_epochs=1,
        save_steps=100,
        max_grad_norm=0.1,
        beta=0.02,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        temperature=0.9,
        report_to=["wandb"],
        log_completions=True,
    )
    adapter = LoraConfig(
        r=16,
        lora_alpha=64,
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "up_proj",
            "down_proj",
            "gate_proj",
        ],
        task_type="CAUSAL_LM",
        lora_dropout=0.0,
    )
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=[correct],
        args=config,
        train_dataset=load_dataset("my/sums", split="train"),
        peft_config=adapter,
    )
    trainer.train()


if __name__ == "__main__":
    main()
