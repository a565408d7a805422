"""Losses and gradients of TRL's trainers on given tokens. Runs in an environment with TRL, without Dovetail.

Usage: python trl_losses.py REQUEST.json OUT. The request has `model`, `reference`, `reward_model` and `rows` (`prompt_ids`, for each
side its ids, and `margin`); `cases` names a trainer each, its settings, and whether it reads margins. For every case OUT/NAME.safetensors
holds the gradient of every parameter and `loss`.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

SIDES = ("chosen", "rejected")
COMMON = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": None,
}


def trained(request, case, out):
    """The trainer's loss of one batch of all rows, a tensor, and its model."""
    kind, settings, rows = case["trainer"], case["settings"], request["rows"]
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    how = COMMON | {"per_device_train_batch_size": 2 * len(rows), "output_dir": str(out)} | settings
    # What a trainer is made with; the batch is put together from the request's tokens.
    texts = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2)
    if kind == "reward":
        data = [
            {f"{side}_ids": row["prompt_ids"] + row[side] for side in SIDES}
            | ({"margin": row["margin"]} if case["margin"] else {})
            for row in rows
        ]
        trainer = RewardTrainer(
            AutoModelForSequenceClassification.from_pretrained(
                request["reward_model"], dtype=torch.float32
            ),
            RewardConfig(**how),
            train_dataset=texts,
            processing_class=tokenizer,
        )
        return trainer.compute_loss(trainer.model, trainer.data_collator(data)), trainer.model
    model, reference = (
        AutoModelForCausalLM.from_pretrained(request[name], dtype=torch.float32)
        for name in ("model", "reference")
    )
    if kind == "dpo":
        data = [
            {"prompt_ids": row["prompt_ids"], **{f"{side}_ids": row[side] for side in SIDES}}
            for row in rows
        ]
        trainer = DPOTrainer(
            model,
            reference,
            DPOConfig(**how),
            train_dataset=texts,
            processing_class=tokenizer,
        )
        return trainer.compute_loss(trainer.model, trainer.data_collator(data)), trainer.model
    if kind == "kto":
        data = [
            {
                "prompt_ids": row["prompt_ids"],
                "completion_ids": row[side],
                "label": side == "chosen",
            }
            for row in rows
            for side in SIDES
        ]
        for one, before in zip(data, [data[-1], *data[:-1]], strict=True):
            one["KL_completion_ids"] = before["completion_ids"]
        rated = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
        trainer = KTOTrainer(
            model,
            reference,
            KTOConfig(**how),
            train_dataset=Dataset.from_list(rated),
            processing_class=tokenizer,
        )
        return trainer.compute_loss(trainer.model, trainer.data_collator(data)), trainer.model

    config, trainer_class = {
        "cpo": (CPOConfig, CPOTrainer),
        "orpo": (ORPOConfig, ORPOTrainer),
    }[kind]
    how.pop("max_length")
    trainer = trainer_class(
        model,
        config(**how),
        train_dataset=texts,
        processing_class=tokenizer,
    )
    batch = {}
    for side in SIDES:
        ids = [torch.tensor(row["prompt_ids"] + row[side]) for row in rows]
        labels = [
            torch.tensor([-100] * len(row["prompt_ids"]) + row[side], dtype=torch.long)
            for row in rows
        ]
        pad = torch.nn.utils.rnn.pad_sequence
        batch[f"{side}_input_ids"] = pad(ids, batch_first=True)
        batch[f"{side}_labels"] = pad(labels, batch_first=True, padding_value=-100)
        ones = [torch.ones_like(each) for each in ids]
        batch[f"{side}_attention_mask"] = pad(ones, batch_first=True)
    return trainer.get_batch_loss_metrics(trainer.model, batch)[0], trainer.model


def main():
    """Compute every case."""
    request, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for case in request["cases"]:
        loss, model = trained(request, case, out / "trainer")
        loss.backward()
        found = {
            name: p.grad.float().contiguous()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        save_file(found | {"loss": loss.detach().float()}, out / f"{case['name']}.safetensors")


if __name__ == "__main__":
    main()
