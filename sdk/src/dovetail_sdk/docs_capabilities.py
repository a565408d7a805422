"""The capabilities that plugins may declare beyond their interface, by kind, each with its promise."""

from __future__ import annotations

from collections.abc import Mapping

EVERYWHERE: Mapping[str, str] = {
    "deterministic": "The same inputs and seed give the same bits. A run resumes bit for bit if all of its plugins have this capability.",
}
"""Capabilities that plugins of any kind may claim."""

_SEVERAL = "Treats the sequences of a forked trajectory as one trajectory; the rule `several_sequences` requires this."

CAPABILITIES: Mapping[str, Mapping[str, str]] = {
    "rollout": {
        "logprobs": "Returns every token's log-probability under the distribution that was sampled from, such as after top-p.",
        "raw_logprobs": "Also returns log-probabilities under the full softmax of logits / temperature.",
        "scores": "`score` returns the log-probabilities of given tokens; the check of new weights needs it.",
        "per_sample_seed": "A sample depends only on its own random stream, not on what else is generated at the same time.",
        "sleep": "`sleep` frees accelerator memory, and `wake` allocates it again.",
        "discards_weights": "`sleep` may discard the weights; a full weight update restores them.",
        "keeps_cache": "Running requests continue across a weight update with their KV cache: `PauseMode.KEEP_CACHE`.",
        "lora": "Accepts weight updates of kind `adapter`, with the effect of a merged adapter; if one fails, the previous adapter stays.",
        "images": "Generates for prompts with images.",
        "server": "Can run as a server in a separate process, reached over HTTP.",
        "tensor_parallel": "Spreads one replica over several accelerators.",
    },
    "agent_loop": {
        "forks": "Calls `Session.fork`, so that a sample may be several sequences.",
    },
    "engine": {
        "follows": "A model can take over another model's weights, or average them into its own: `write_weights` and `average_weights`.",
        "lora": "Trains low-rank adapters.",
        "images": "Trains on samples with images.",
        "offload": "`offload` frees accelerator memory, and `onload` allocates it again.",
        "value_head": "Trains a model that returns one value per token: a critic or a reward model.",
    },
    "advantage": {
        "several_sequences": _SEVERAL,
    },
    "loss_aggregation": {
        "several_sequences": _SEVERAL,
    },
    "objective": {
        "several_sequences": _SEVERAL,
    },
    "stage": {
        "several_sequences": _SEVERAL,
    },
    "optimizer": {
        "sharded": "Updates parameters that are divided over ranks (DTensor); each rank updates its own part.",
    },
    "reward_manager": {
        "async_functions": "Awaits reward functions that are coroutines.",
        "timeout": "Ends a reward function that takes too long, and reports a failure.",
        "processes": "Runs reward functions in separate processes; if one crashes, its samples fail and the run continues.",
        "service": "Calls a service over the network.",
        "sleep": "`sleep` frees memory that only scoring needs.",
    },
    "reward_function": {
        "sandboxed": "Runs what the policy wrote, in a sandbox.",
    },
    "tool": {
        "sandboxed": "Runs what the model wrote, in a sandbox.",
    },
    "runtime": {
        "task_workers": "Starts additional processes for scoring, outside of the pools: `task_workers`.",
    },
    "weight_transport": {
        "in_process": "Sender and receivers are in one process.",
        "across_processes": "Sender and receivers may be in different processes.",
        "across_machines": "Sender and receivers may be on different machines.",
        "on_each_machine": "Sender and receivers are on one machine; in a run on several machines, the first rank of each sends to the receivers there.",
        "ends_meet": "Sender and receivers run at the same time and wait for each other.",
    },
}
"""Kind → capability → the capability's promise, which the conformance suite tests as far as it can."""
