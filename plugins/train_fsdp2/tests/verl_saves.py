"""Checkpoints as verl's FSDP workers save them: ranks on gloo, models sharded by FSDP1 or FSDP2, one torch.save for each rank.

Run as a script: BASE OUT WORLD,CASE,... ... writes OUT/CASE/ for each, and OUT/CASE-whole.pt with the model's whole weights.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import (
    _or_policy,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import Shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer


def model_for(case: str, base: str) -> nn.Module:
    """The model that every rank of a case starts from, the same on all."""
    torch.manual_seed(1)
    if "critic" in case:
        config = AutoConfig.from_pretrained(base, num_labels=1)
        model = AutoModelForTokenClassification.from_pretrained(base, config=config)
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
    model = model.to(torch.bfloat16 if "bfloat16" in case else torch.float32)
    if "lora" in case:
        model.enable_input_require_grads()
        kind, targets = "CAUSAL_LM", "all-linear"
        if "critic" in case:
            kind, targets = "TOKEN_CLS", ["q_proj", "down_proj"]
        model = get_peft_model(
            model, LoraConfig(task_type=kind, r=4, lora_alpha=6, target_modules=targets)
        )
        model = model.to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def sharded(case: str, model: nn.Module, world: int) -> nn.Module:
    """As verl's `apply_fsdp2`, or its FSDP1 with the same wrapping."""
    two = "hybrid" in case
    mesh = init_device_mesh(
        "cpu",
        (2, world // 2) if two else (world,),
        mesh_dim_names=("ddp", "fsdp") if two else ("fsdp",),
    )
    if "fsdp2" in case:
        tied = model.config.tie_word_embeddings
        place = None
        if "columns" in case:
            place = lambda p: Shard(  # noqa: E731
                next((dim for dim, size in enumerate(p.shape) if size % world == 0), 0)
            )
        for module in list(model.modules()):
            if isinstance(module, Qwen2DecoderLayer) or (
                isinstance(module, nn.Embedding) and not tied
            ):
                fully_shard(module, mesh=mesh, shard_placement_fn=place)
        return fully_shard(model, mesh=mesh, shard_placement_fn=place)
    policies = [
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen2DecoderLayer})
    ]
    if "lora" in case:
        leaf = lambda m: (  # noqa: E731
            not list(m.children())
            and getattr(m, "weight", None) is not None
            and m.weight.requires_grad
        )
        policies.append(functools.partial(lambda_auto_wrap_policy, lambda_fn=leaf))
    return FSDP(
        model,
        use_orig_params=False,
        auto_wrap_policy=functools.partial(_or_policy, policies=policies),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if two else ShardingStrategy.FULL_SHARD,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
    )


def save(case: str, model: nn.Module, folder: Path, base: str, rank: int, world: int) -> None:
    """As verl's FSDPCheckpointManager.save_checkpoint, and its worker for an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, FSDP):
        FSDP.set_state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
    torch.save(model.state_dict(), folder / f"model_world_size_{world}_rank_{rank}.pt")
    if rank:
        return
    inner = model._fsdp_wrapped_module if isinstance(model, FSDP) else model
    described = folder / "huggingface"
    if inner.can_generate():
        GenerationConfig.from_pretrained(inner.config.name_or_path).save_pretrained(described)
    inner.config.save_pretrained(described)
    AutoTokenizer.from_pretrained(base).save_pretrained(described)
    version = 1 if isinstance(model, FSDP) else 2
    (folder / "fsdp_config.json").write_text(
        json.dumps({"FSDP_version": version, "world_size": world})
    )
    if "lora" in case:
        config = asdict(inner.peft_config["default"])
        for key in ("task_type", "peft_type"):
            config[key] = getattr(config[key], "value", config[key])
        config["target_modules"] = list(config["target_modules"])
        (folder / "lora_adapter").mkdir()
        (folder / "lora_adapter" / "adapter_config.json").write_text(
            json.dumps(config, default=str)
        )


def rank_of(rank: int, world: int, base: str, out: Path, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/store-{world}", rank=rank, world_size=world
    )
    for case in cases:
        model = model_for(case, base)
        if rank == 0:
            whole = model_for(case, base)
            whole = whole.merge_and_unload() if "lora" in case else whole
            torch.save(whole.state_dict(), out / f"{case}-whole.pt")
        folder = out / case / "global_step_7" / "actor"
        save(case, sharded(case, model, world), folder, base, rank, world)
        if rank == 0:
            (out / case / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    base, out, *jobs = sys.argv[1:]
    for job in jobs:
        world, *cases = job.split(",")
        mp.start_processes(
            rank_of, (int(world), base, Path(out), cases), int(world), start_method="fork"
        )
