"""DPO with an adapter, as jobs of TRL's are written: the base without it is the reference."""

import trl
from datasets import load_dataset
from peft import LoraConfig

BETA = 0.1
training_args = trl.DPOConfig(
    output_dir="outputs/dpo",
    beta=BETA,
    loss_type="sigmoid",
    learning_rate=5e-6,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    max_length=1024,
    max_steps=1000,
    warmup_steps=150,
    lr_scheduler_type="cosine",
    label_smoothing=0.0,
    save_strategy="steps",
    save_steps=500,
    seed=3,
)
trainer = trl.DPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    ref_model=None,
    args=training_args,
    train_dataset=load_dataset("my/pairs", split="train"),
    peft_config=LoraConfig(
        r=16, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0
    ),
)
trainer.train()
