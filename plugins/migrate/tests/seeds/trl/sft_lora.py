"""Fine-tuning with an adapter, as jobs of TRL's are written."""

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("my/chats", split="train")
args = SFTConfig(
    output_dir="outputs/sft",
    max_length=1024,
    packing=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    gradient_checkpointing=True,
    learning_rate=2e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=5,
    num_train_epochs=3,
    assistant_only_loss=True,
    logging_steps=25,
    eval_strategy="steps",
    eval_steps=100,
    save_total_limit=2,
    optim="adamw_torch_fused",
    report_to="none",
)
peft_config = LoraConfig(
    r=32, lora_alpha=16, target_modules="all-linear", bias="none", task_type="CAUSAL_LM"
)
trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=args,
    train_dataset=dataset,
    eval_dataset=load_dataset("my/chats", split="test"),
    peft_config=peft_config,
)
trainer.train()
trainer.save_model("outputs/sft/final")
