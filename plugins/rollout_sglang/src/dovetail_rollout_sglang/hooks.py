"""Hooks that SGLang calls in every process of a server, to receive weights; active only in servers that Dovetail starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

SERVED_VARIABLE = "DOVETAIL_SGLANG_SERVED"
"""Environment variable that is set in processes of servers started by `dovetail_rollout_sglang.serve`."""
LOAD_FORMAT = "dovetail"
"""The load format of a weight update that carries a command of Dovetail instead of tensors."""


def register() -> None:
    """Install Dovetail's hooks in this SGLang process; do nothing in a server without Dovetail's routes."""
    if not os.environ.get(SERVED_VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dovetail_rollout_sglang.versions import updater

    HookRegistry.register(updater(), answer_commands, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req._check_token_based_finish",
        end_at_stop_tokens,
        HookType.AROUND,
    )


def answer_commands(update: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Run Dovetail's command if a request for a weight update contains one; pass other requests to SGLang's own method.

    Args:
        update: SGLang's method that this function wraps.
        updater: the object on which SGLang calls the method.
        request: SGLang's UpdateWeightsFromTensorReqInput.
    """
    if request.load_format != LOAD_FORMAT:
        return update(updater, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    from dovetail_rollout_sglang.worker import worker_of

    message = worker_of(updater).answer(request.serialized_named_tensors[0])
    return UpdateWeightsFromTensorReqOutput(success=True, message=message)


def end_at_stop_tokens(check: Callable[..., bool], sample: Any, new_ids: Sequence[int]) -> bool:
    """Check whether a sample ends; a sample with `ignore_eos` also ends at its stop tokens.

    SGLang's own check ignores the stop tokens of such a sample.

    Args:
        check: SGLang's method that this function wraps.
        sample: SGLang's Req.
        new_ids: the token ids since the last check, at the end of `sample.output_ids`.
    """
    params = sample.sampling_params
    if not (params.ignore_eos and params.stop_token_ids):
        return check(sample, new_ids)
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    for number, token_id in enumerate(new_ids, start=1):
        if token_id in params.stop_token_ids:
            sample.finished_reason = FINISH_MATCHED_TOKEN(matched=token_id)
            sample.finished_len = len(sample.output_ids) - len(new_ids) + number
            return True
    return False
