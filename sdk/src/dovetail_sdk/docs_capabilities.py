"""The capabilities that plugins may declare beyond their interface, by kind, each with its promise."""

from __future__ import annotations

from collections.abc import Mapping

EVERYWHERE: Mapping[str, str] = {
    "deterministic": "The same inputs and seed give the same bits. A run resumes bit for bit where all of its plugins claim it.",
}
"""Capabilities that plugins of any kind may claim."""

_SEVERAL = "Takes the sequences of a forked trajectory together, where it otherwise would be refused: rule `several_sequences`."

CAPABILITIES: Mapping[str, Mapping[str, str]] = {
    "rollout": {
        "logprobs": "Gives the log-probability of every token under the sampler as used.",
        "raw_logprobs": "Gives log-probabilities under the full softmax of logits / temperature too.",
        "scores": "`score` tells how likely the model finds given tokens: the probe of new weights needs it.",
        "per_sample_seed": "A sample depends on its own random stream alone, whatever else is generated beside it.",
        "sleep": "`sleep` frees memory of the accelerator, and `wake` takes it again.",
        "discards_weights": "`sleep` may throw weights away; a whole update brings them back.",
        "keeps_cache": "Running requests go on over an update with their keys and values: `PauseMode.KEEP_CACHE`.",
        "lora": "Takes updates of kind `adapter`, as if merged; one that fails leaves the one before in force.",
        "images": "Generates for prompts with images.",
        "server": "Can run in a process of its own, as a server that is reached over HTTP.",
        "tensor_parallel": "Spreads one replica over several accelerators.",
    },
    "agent_loop": {
        "forks": "Calls `Session.fork`, so that a sample may be several sequences.",
    },
    "engine": {
        "follows": "A model follows another: `write_weights` and `average_weights`.",
        "lora": "Trains low-rank adapters.",
        "images": "Trains on samples with images.",
        "offload": "`offload` frees the accelerator's memory, and `onload` takes it again.",
        "value_head": "Trains a model that ends in one value a token: a critic, or a reward model.",
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
        "sharded": "Steps parameters that are divided over ranks (DTensor), each rank its part.",
    },
    "reward_manager": {
        "async_functions": "Awaits reward functions that are coroutines.",
        "timeout": "Ends a reward function that takes too long, and reports a failure.",
        "processes": "Runs reward functions in processes: a crash of one is a failure and no end of the run.",
        "service": "Asks a service over the network.",
        "sleep": "`sleep` frees memory that only scoring needs.",
    },
    "reward_function": {
        "sandboxed": "Runs what the policy wrote, in a sandbox.",
    },
    "tool": {
        "sandboxed": "Runs what the model wrote, in a sandbox.",
    },
    "runtime": {
        "task_workers": "Starts further processes beside the pools, for scoring: `task_workers`.",
    },
    "weight_transport": {
        "in_process": "Both ends are in one process.",
        "across_processes": "The ends may be in different processes.",
        "across_machines": "The ends may be on different machines.",
        "on_each_machine": "The ends are on one machine; of a run on several, the first rank of each machine sends to the receivers there.",
        "ends_meet": "Sender and receivers run at once and wait for each other.",
    },
}
"""Kind → capability → the capability's promise, which the conformance suite tests as far as it can."""
