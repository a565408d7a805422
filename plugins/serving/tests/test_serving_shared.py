"""Common parts of serving engines: configs, arguments and metrics of servers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from dovetail.errors import ConfigError, ModelError, RolloutError
from dovetail.interfaces import PluginContext
from dovetail.metrics import Mean, Sum
from dovetail.sections import ModelSection, RolloutSection
from dovetail_sdk.testing.fake_server import FakeServer, words_of
from dovetail_serving import (
    DESCRIBE,
    AdaptedSection,
    CounterDelta,
    Counters,
    ServerConnection,
    ServingSection,
    answers_of,
    free_bytes,
    has_tokenizer,
    log_path,
    merged_arguments,
    model_of,
    port_of,
    refuse_problems,
    replica_seed,
    starts_empty,
    unknown_argument,
    visible_devices,
)


@attrs.frozen(kw_only=True)
class WithMode(ServingSection):
    """A section that by default drives its engine without a server."""

    mode: str = "engine"


class TestSection:
    def test_it_joins_as_many_as_it_names_and_takes_ranks_for_its_own(self) -> None:
        assert ServingSection(name="x").joined == 0
        joining = ServingSection(name="x", urls=("http://a:1", "https://b"))
        assert joining.joined == 2
        assert ServingSection(name="x", tensor_parallel_size=4).ranks_per_replica() == 4

    def test_one_replica_more_joins_one_server_in_mode_server(self) -> None:
        own = WithMode(name="x", port=8000, mode="server", replicas=2)
        (one,) = own.joining("http://a:1").addresses
        assert one == "http://a:1"
        assert WithMode(name="x").joining("http://a:1").mode == "server"
        with pytest.raises(ConfigError, match=r"'a:1' is.*a server"):
            own.joining("a:1")
        with pytest.raises(ConfigError, match="no server can be added"):
            RolloutSection(name="x").joining("http://a:1")

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"urls": ("10.0.0.2:8000",)}, "server's address"),
            ({"urls": ("http://a", "http://a/")}, "server twice"),
            ({"urls": ("http://a",), "port": 8000}, r"joins servers \(rollout.urls\)"),
            ({"port": 80}, "1024"),
            ({"start_timeout": 0.0}, "start_timeout"),
        ],
    )
    def test_what_contradicts_itself_is_refused(self, settings: Any, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            ServingSection(name="x", **settings)

    def test_without_servers_there_is_nothing_to_join_and_no_port(self) -> None:
        with pytest.raises(ValueError, match=r"set rollout\.mode=server"):
            WithMode(name="x", urls=("http://a",))
        with pytest.raises(ValueError, match=r"has mode 'engine': leave rollout\.port out"):
            WithMode(name="x", port=8000)
        assert WithMode(name="x", mode="server", port=8000).port == 8000

    def test_room_for_adapters_is_said_with_what_to_set(self) -> None:
        assert AdaptedSection(name="x", max_adapter_rank=8).adapter_problem(8) is None
        assert AdaptedSection(name="x", max_adapter_rank=8).adapter_problem(None) is None
        few = AdaptedSection(name="x", max_adapter_rank=8).adapter_problem(16)
        assert few is not None
        assert "set rollout.max_adapter_rank=16" in few
        assert "no room" in (AdaptedSection(name="x").adapter_problem(None) or "")


class TestArguments:
    def test_ours_win_over_theirs_and_mappings_are_merged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        theirs = {"a": 1, "same": 2, "deep": {"x": {"p": 1, "q": 2}, "y": 3}, "flat": {"k": 1}}
        ours = {"a": 5, "same": 2, "deep": {"x": {"p": 9}}, "flat": 7, "own": True}
        with caplog.at_level(logging.WARNING):
            found = merged_arguments(theirs, ours, PluginContext())
        assert found == {
            "a": 5,
            "same": 2,
            "deep": {"x": {"p": 9, "q": 2}, "y": 3},
            "flat": 7,
            "own": True,
        }
        (record,) = caplog.records
        assert record.getMessage().endswith(
            "Dovetail's own: a=1 (Dovetail sets 5); deep.x.p=1 (Dovetail sets 9); flat={'k': 1} (Dovetail sets 7)"
        )
        assert theirs["deep"] == {"x": {"p": 1, "q": 2}, "y": 3}

    def test_nothing_is_said_where_both_agree(self, caplog: pytest.LogCaptureFixture) -> None:
        assert merged_arguments({"a": 1}, {"a": 1}, PluginContext()) == {"a": 1}
        assert not caplog.records

    def test_an_unknown_argument_is_named_with_the_nearest(self) -> None:
        error = unknown_argument("max_seqs", ("max_num_seqs", "dtype"), engine="Engine")
        assert isinstance(error, ConfigError)
        assert "no engine argument 'max_seqs'" in error.message
        assert error.hint == "did you mean 'max_num_seqs'?"
        assert "documentation" in (unknown_argument("zzz", ("dtype",), engine="Engine").hint or "")

    def test_a_model_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="no model"):
            model_of(PluginContext())
        with pytest.raises(ModelError, match=r"config\.json is missing"):
            model_of(PluginContext(model=ModelSection(path=str(tmp_path))))

    def test_a_tokenizer_is_looked_for_where_the_config_says(self, tmp_path: Path) -> None:
        (tmp_path / "apart").mkdir()
        (tmp_path / "apart" / "tokenizer.json").touch()
        assert not has_tokenizer(ModelSection(path=str(tmp_path)))
        apart = str(tmp_path / "apart")
        assert has_tokenizer(ModelSection(path=str(tmp_path), tokenizer_path=apart))
        assert has_tokenizer(ModelSection(path="some/hub-id"))

    def test_replicas_engines_and_runs_draw_apart(self) -> None:
        contexts = [PluginContext(seed=s, rank=r) for s in range(3) for r in range(3)]
        seeds = {replica_seed(engine, one) for engine in ("a", "b") for one in contexts}
        assert len(seeds) == 18
        assert all(0 <= seed < 1 << 31 for seed in seeds)

    def test_it_starts_empty_only_where_nothing_needs_the_weights(self) -> None:
        follows = PluginContext(weights_follow=True)
        plain = ServingSection(name="x")
        assert starts_empty(plain, follows)
        assert not starts_empty(plain, PluginContext())
        assert not starts_empty(plain, follows, kept="fp8")
        chosen = ServingSection(name="x", engine_args={"load_format": "auto"})
        assert not starts_empty(chosen, follows)
        assert not starts_empty(ServingSection(name="x", urls=("http://a",)), follows)


class TestEnvironment:
    def test_a_log_is_in_the_runs_directory_or_in_one_of_its_own(self, tmp_path: Path) -> None:
        inside = log_path("engine", PluginContext(run_directory=tmp_path, rank=3))
        assert inside == tmp_path / "logs" / "rollout-3.engine.log"
        assert inside.parent.is_dir()
        outside = log_path("engine", PluginContext())
        assert outside.parent.is_dir()
        outside.parent.rmdir()

    @pytest.mark.parametrize(
        ("device", "before", "expected"),
        [
            ("cuda:0", "4,5,6,7", {}),
            ("cuda:2", "4,5,6,7", {"SEEN": "6,7"}),
            ("cuda:2", "", {"SEEN": "2,3"}),
        ],
    )
    def test_an_engine_begins_at_its_replicas_accelerator(
        self, monkeypatch: pytest.MonkeyPatch, device: str, before: str, expected: Any
    ) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setenv("SEEN", before)
        assert visible_devices(2, PluginContext(device=device), "SEEN") == expected

    def test_a_cpu_has_no_memory_of_an_accelerators(self) -> None:
        assert free_bytes(torch.device("cpu")) == 0


class TestJoining:
    def _asked(self, url: str, *paths: str) -> Any:
        async def ask() -> Any:
            connection = ServerConnection(
                url,
                engine="Engine",
                token="",
                patience=5.0,
                ended=lambda: None,
                died=RolloutError,
            )
            try:
                return await answers_of(connection, *paths, token_variable="TOKEN", hint="so")
            finally:
                await connection.close()

        return asyncio.run(ask())

    def test_answers_come_in_order_whatever_they_are(self, fake: FakeServer) -> None:
        fake.answers["/version"] = words_of({"version": "1"})
        version, routes = self._asked(fake.url, "/version", DESCRIBE)
        assert version.json() == {"version": "1"}
        assert routes.status_code == 404

    def test_nobody_and_another_token_are_told_apart(self, fake: FakeServer) -> None:
        fake.answers[DESCRIBE] = words_of({}, status=401)
        with pytest.raises(
            RolloutError, match=r"requires another access token .*\n.*set TOKEN here"
        ):
            self._asked(fake.url, DESCRIBE)
        with pytest.raises(RolloutError, match="no server answers"):
            self._asked("http://127.0.0.1:9", DESCRIBE)

    def test_all_that_is_wrong_is_said_at_once(self) -> None:
        refuse_problems([], engine="Engine", url="http://a", hint="so")
        with pytest.raises(RolloutError, match=r"Engine server at http://a .*: one; two\n.*so"):
            refuse_problems(["one", "two"], engine="Engine", url="http://a", hint="so")

    def test_an_address_without_a_port_has_the_usual_one(self) -> None:
        assert port_of("http://10.0.0.2:9000/", 8000) == 9000
        assert port_of("http://10.0.0.2", 8000) == 8000


class TestCounterDelta:
    def test_figures_are_those_since_the_last_look(self) -> None:
        delta = CounterDelta(
            "rollout/x/", "tokens", lambda grown, totals: {"new": Sum(grown["tokens"])}
        )
        assert delta.since({"tokens": 5.0})["rollout/x/new"].value == 5.0
        assert delta.since({"tokens": 7.0})["rollout/x/new"].value == 2.0
        assert delta.since({"tokens": 7.0}) == {}

    def test_samples_are_counted_as_they_run(self) -> None:
        counters = Counters("tokens")
        with counters.running():
            with counters.running():
                counters.add(tokens=3)
            assert counters.totals()["running_max"] == 2.0
        totals = counters.totals()
        assert totals["tokens"] == 3.0
        # Each reading resets the maximum to the number of samples running at that time.
        assert totals["running_max"] == 1.0
        assert totals["sample_seconds"] >= totals["busy_seconds"] > 0
        assert Mean(totals["sample_seconds"], totals["busy_seconds"]).value >= 1.0
