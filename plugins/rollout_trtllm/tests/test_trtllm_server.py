"""The server of a replica: its command, its checkpoint, and its failures."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from safetensors.torch import load_file
from torch import Tensor

from dovetail.errors import ConfigError, PluginNeedsError, RolloutError, WeightSyncError
from dovetail.interfaces import PluginContext, PluginRef, SamplingParams
from dovetail.plugins import make_plugin
from dovetail.sections import ModelSection
from dovetail_rollout_trtllm.checkpoint import write_checkpoint
from dovetail_rollout_trtllm.examination import examine
from dovetail_rollout_trtllm.names import refuse_other_tensors
from dovetail_rollout_trtllm.rollout import TrtllmRollout
from dovetail_rollout_trtllm.server import engine_options
from dovetail_rollouts.transports.config import InProcessTransportConfig
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.replicas import send_weights
from dovetail_sdk.testing.tiny import tiny_model, tiny_tokenizer
from dovetail_sdk.testing.transport_ends import manifest_of
from dovetail_serving import SampleCall


def transport(run_directory: Path) -> Any:
    config = InProcessTransportConfig(name="in_process", timeout=60.0)
    ref = PluginRef(kind="weight_transport", name="in_process", config=config)
    return make_plugin(ref, PluginContext(run_directory=run_directory))


def update(rollout: TrtllmRollout, model: PlainModel, version: int) -> None:
    weights = model.weights()
    sender = rollout.context.transport.sender()
    try:
        send_weights(rollout, sender, manifest_of(weights, version), weights.items())
    finally:
        sender.close()


def generate(rollout: TrtllmRollout, tokens: int = 4) -> list[int]:
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    call = SampleCall(call_id="c", prompt_ids=[7, 8, 9], sampling=sampling)
    return asyncio.run(rollout.backend.generate(call)).response_ids.tolist()


def process_of(rollout: TrtllmRollout) -> int:
    """The server's process, below the two that guard it."""
    own: Any = rollout.backend._own  # type: ignore[attr-defined]
    found: int = own._process._guard.pid
    for _ in range(2):
        found = int(Path(f"/proc/{found}/task/{found}/children").read_text().split()[0])
    return found


def test_the_config_becomes_options_of_the_engine(config: Any, context: Any) -> None:
    chosen = config(
        tensor_parallel_size=2,
        expert_parallel_size=1,
        max_model_len=512,
        max_num_seqs=8,
        max_num_tokens=64,
        enforce_eager=True,
        prefix_caching=False,
        kv_cache_memory=0.3,
        engine_args={"kv_cache_config": {"tokens_per_block": 64}, "stream_interval": 4},
    )
    assert engine_options(chosen, context()) == {
        "dtype": "float32",
        "trust_remote_code": False,
        "tensor_parallel_size": 2,
        "moe_expert_parallel_size": 1,
        "max_seq_len": 512,
        "max_input_len": 512,
        "max_batch_size": 8,
        "max_num_tokens": 64,
        "cuda_graph_config": None,
        "stream_interval": 4,
        "kv_cache_config": {
            "enable_block_reuse": False,
            "free_gpu_memory_fraction": 0.3,
            "dtype": "auto",
            "tokens_per_block": 64,
        },
    }


def test_overrides_of_the_models_config_are_options_and_its_limit(
    config: Any, context: Any
) -> None:
    made = context()
    overrides = {"max_position_embeddings": 8192}
    model = attrs.evolve(made.model, override_config=overrides)
    options = engine_options(config(), attrs.evolve(made, model=model))
    assert options["model_kwargs"] == overrides
    assert options["max_seq_len"] == 8192


@pytest.mark.parametrize(
    "settings",
    [
        {"urls": ("http://10.0.0.2:8000",)},
        {"engine_args": {"pipeline_parallel_size": 2}},
        {"tensor_parallel_size": 4, "expert_parallel_size": 3},
    ],
)
def test_settings_that_can_not_work_are_refused(config: Any, settings: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError), match=f"rollout.*{list(settings)[-1]}"):
        config(**settings)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"tensor_parallel_size": 3}, ConfigError), ({"executable": "no-such"}, PluginNeedsError)],
)
def test_what_no_server_starts_with_is_refused_before_weights_follow(
    config: Any, context: Any, settings: dict[str, Any], kind: type[Exception]
) -> None:
    [(key, value)] = settings.items()
    with pytest.raises(kind, match=str(value)) as found:
        TrtllmRollout(config(**settings), context(weights_follow=True)).start()
    assert key in str(found.value)


def test_a_server_that_ends_at_its_start_is_reported_with_what_it_printed(
    config: Any, context: Any, tmp_path: Path
) -> None:
    rollout = TrtllmRollout(config(engine_args={"fail": 7}), context())
    with pytest.raises(RolloutError, match="ended with status 7") as found:
        rollout.start()
    assert "options {'fail': 7" in found.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_a_server_of_another_model_is_refused(config: Any, context: Any) -> None:
    rollout = TrtllmRollout(config(engine_args={"pose_as": "another"}), context())
    with pytest.raises(RolloutError, match=r"another.*expected 'tiny'"):
        rollout.start()


def test_a_server_that_dies_fails_what_runs_and_the_replica(replica: TrtllmRollout) -> None:
    def kill() -> None:
        while not replica.backend._running:  # type: ignore[attr-defined]
            time.sleep(0.01)
        time.sleep(0.2)  # until the server has received the request
        os.kill(process_of(replica), signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(RolloutError, match="has died"):
        generate(replica, tokens=3000)
    killing.join()
    assert not replica.alive()
    with pytest.raises(RolloutError, match="has died"):
        generate(replica)


def test_where_weights_follow_the_first_update_starts_the_server(
    config: Any, context: Any, tiny: Path, tmp_path: Path
) -> None:
    follows = context(weights_follow=True, transport=transport(tmp_path))
    rollout = TrtllmRollout(config(), follows)
    rollout.start()
    try:
        assert rollout.alive()
        assert not (tmp_path / "logs").exists()
        plain = PlainModel.of(tiny)
        for version, model in enumerate((plain.changed(), plain), start=1):
            update(rollout, model, version)
            assert generate(rollout) == model.greedy((7, 8, 9), 4).tolist()
            (written,) = tmp_path.glob("trtllm-0-*/version-*")
            assert written.name.startswith(f"version-{version}-")
    finally:
        rollout.close()
    assert not list(tmp_path.glob("trtllm-*"))


def test_an_update_on_which_no_server_starts_fails_and_the_next_one_is_taken(
    config: Any, context: Any, tiny: Path, tmp_path: Path, trtllm_serve: str
) -> None:
    broken = tmp_path / "broken"
    program = tmp_path / "serve"
    program.write_text(f'#!/bin/sh\ntest -e {broken} && exit 3\nexec {trtllm_serve} "$@"\n')
    program.chmod(0o755)
    rollout = TrtllmRollout(
        config(executable=str(program), checkpoint_directory=str(tmp_path / "elsewhere")),
        context(transport=transport(tmp_path)),
    )
    rollout.start()
    try:
        plain = PlainModel.of(tiny)
        broken.touch()
        with pytest.raises(WeightSyncError, match="update 1 broke off"):
            update(rollout, plain, 1)
        assert not rollout.alive()
        broken.unlink()
        update(rollout, plain, 2)
        assert rollout.alive()
        assert generate(rollout) == plain.greedy((7, 8, 9), 4).tolist()
        assert len(list(tmp_path.glob("elsewhere/trtllm-0-*/version-*"))) == 1
    finally:
        rollout.close()


def test_sleep_ends_the_server_and_wake_starts_it_once_nothing_sleeps(
    replica: TrtllmRollout,
) -> None:
    server = process_of(replica)
    replica.sleep(frozenset({"weights", "kv_cache"}))
    assert not Path(f"/proc/{server}").exists()
    assert replica.alive()
    replica.wake(frozenset({"weights"}))
    assert replica.backend._own is None  # type: ignore[attr-defined]
    replica.wake(frozenset({"kv_cache"}))
    assert len(generate(replica)) == 4


def test_one_name_of_tied_tensors_is_enough(tmp_path: Path) -> None:
    tiny_model(tmp_path, tiny_tokenizer(tmp_path, vocab_size=300), tie_word_embeddings=True)
    section = ModelSection(path=str(tmp_path))
    names = set(load_file(tmp_path / "model.safetensors")) - {"lm_head.weight"}
    refuse_other_tensors(section, names)
    refuse_other_tensors(section, names | {"lm_head.weight"})
    with pytest.raises(WeightSyncError, match=r"of the model: model\.norm\.weight"):
        refuse_other_tensors(section, names - {"model.norm.weight"})
    with pytest.raises(WeightSyncError, match=r"does not have: model\.extra"):
        refuse_other_tensors(section, names | {"model.extra"})


def test_a_checkpoint_has_the_models_files_unchanged_and_the_new_weights(
    tiny: Path, tmp_path: Path
) -> None:
    weights = PlainModel.of(tiny).changed().weights()

    def received() -> Iterator[tuple[str, Tensor]]:
        """Yield tensors that are overwritten when the next one is requested, as a receiver's may be."""
        for name, tensor in weights.items():
            buffer = tensor.clone()
            yield name, buffer
            buffer.zero_()

    write_checkpoint(tmp_path / "new", ModelSection(path=str(tiny)), received())
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "new" / name).read_bytes() == (tiny / name).read_bytes()
    found = {}
    for file in (tmp_path / "new").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].equal(tensor)


def test_the_doctor_says_that_the_plugin_has_not_run_on_the_engine() -> None:
    assert "not run on the real engine" in examine()[0]["detail"]
