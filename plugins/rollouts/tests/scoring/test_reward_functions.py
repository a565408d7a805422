"""The choice of each row's reward function, and errors before training begins."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import ConfigError, DataError
from dovetail.interfaces import PluginContext, Prompt, RewardFunction, RewardManager
from dovetail.sections import PluginSection, RewardSection
from dovetail_rollouts import check_sources, configured_functions
from dovetail_rollouts.scoring.functions import InstalledFunctions
from dovetail_rollouts.scoring.rows import unused_functions
from dovetail_sdk.testing import make_sample


class Fours(RewardFunction):
    """A function that scores 4, and accepts only even ground truths."""

    name = "fours"
    api = ">=1.0,<2"

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
    ) -> float:
        return 4.0

    @classmethod
    def check_row(cls, config: Any, ground_truth: Any) -> str | None:
        return f"{ground_truth} is odd" if ground_truth % 2 else None


class Fives(Fours):
    """A function that scores 5."""

    name = "fives"

    def compute_score(self) -> float:
        return 5.0


class Shelf(InstalledFunctions):
    """Reward functions that count as installed: `fours`, with the alias `maths/fours`, and `fives`."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def selected(self, section: PluginSection, context: PluginContext) -> RewardFunction:
        self.made.append(str(section.name))
        return (Fives if section.name == "fives" else Fours)(section, context)

    def named(self, data_source: str, context: PluginContext) -> RewardFunction | None:
        if data_source not in self.known():
            return None
        return self.selected(PluginSection(name=data_source), context)

    def known(self) -> list[str]:
        return ["fours", "maths/fours", "fives"]

    def manager(self, section: PluginSection) -> type[RewardManager]:
        return {"single": RewardManager, "own": Own}[str(section.name)]


class Own(RewardManager):
    """A manager that scores whole groups with its own function `fours`."""

    name = "own"
    unit = "group"

    @classmethod
    def needs_functions(cls, config: Any) -> bool:
        return False

    @classmethod
    def own_functions(cls, config: Any) -> Mapping[str, PluginSection]:
        return {"first": PluginSection(name="fours")}


def functions(**section: Any) -> Any:
    return configured_functions(RewardSection(**section), PluginContext(), loader=Shelf())


def value(found: Any, source: str | None) -> Any:
    return found.function_for(source)(make_sample("s", data_source=source))


def row(index: int, source: str | None = None, truth: Any = 2) -> Prompt:
    return Prompt(
        index=index,
        prompt_ids=np.arange(2),
        raw="",
        data_source=source,
        ground_truth=truth,
        where=f"train.parquet, row {index}",
    )


def test_the_order_is_source_then_function_then_installed_name() -> None:
    by_source = {"a": PluginSection(name="fives")}
    both = functions(functions=by_source, function=PluginSection(name="fours"))
    assert [value(both, source) for source in ("a", "b", None)] == [5.0, 4.0, 4.0]
    installed = functions(functions=by_source)
    assert [value(installed, source) for source in ("a", "maths/fours", "fives")] == [5.0, 4.0, 5.0]


def test_selected_functions_are_made_at_once_and_others_when_a_row_needs_them() -> None:
    shelf = Shelf()
    section = RewardSection(functions={"a": PluginSection(name="fives")})
    found = configured_functions(section, PluginContext(), loader=shelf)
    assert shelf.made == ["fives"]
    for _ in range(3):
        value(found, "fours")
    assert shelf.made == ["fives", "fours"]


def test_an_unmapped_source_is_named_with_its_row_and_how_to_mend_it() -> None:
    rows = [row(0, "fours"), row(1, "math/fours"), row(2, "math/fours"), row(3, "other")]
    with pytest.raises(ConfigError) as error:
        check_sources(functions(), rows)
    text = str(error.value)
    assert "data_source 'math/fours' (train.parquet, row 1) has" in text
    assert "fours, maths/fours; nearest: 'maths/fours'" in text
    assert "data_source 'other' (train.parquet, row 3)" in text
    assert "row 2" not in text
    assert "set reward.function=" in text
    assert len(error.value.problems) == 2


def test_a_function_for_a_source_that_no_row_has_is_named_with_the_nearest() -> None:
    section = RewardSection(
        functions={
            "gsm8k": PluginSection(name="fives"),
            "math/fours": PluginSection(name="fives"),
            "other": PluginSection(name="fives"),
        }
    )
    rows = [row(0, "gsm8k"), row(1, "maths/fours"), row(2, None)]
    first, second = unused_functions(section, rows)
    assert "'math/fours'" in first
    assert "did you mean 'maths/fours'" in first
    assert "'other'" in second
    assert "'gsm8k', 'maths/fours'" in second
    assert unused_functions(RewardSection(), rows) == []


def test_rows_without_a_source_need_the_one_function() -> None:
    with pytest.raises(ConfigError, match=r"a row without data_source \(train.parquet, row 0\)"):
        check_sources(functions(), [row(0)])
    check_sources(functions(function=PluginSection(name="fives")), [row(0), row(1, "anything")])


def test_ground_truths_are_checked_row_by_row() -> None:
    rows = [row(i, "fours", truth=i) for i in range(20)]
    with pytest.raises(DataError) as error:
        check_sources(functions(), rows)
    text = str(error.value)
    assert "train.parquet, row 1: fours" in text
    assert "… and 5 more" in text
    check_sources(functions(), rows[::2])


def test_an_unmapped_source_never_scores_zero() -> None:
    with pytest.raises(ConfigError, match="no reward function"):
        value(functions(), "other")


def test_it_pickles_and_makes_its_functions_again() -> None:
    found = functions(function=PluginSection(name="fours"))
    assert value(pickle.loads(pickle.dumps(found)), "b") == 4.0


def test_a_users_file_scores_every_row(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("def compute_score(solution_str, ground_truth):\n    return 7.0\n")
    section = RewardSection(function=PluginSection(path=str(file)))
    found = configured_functions(section, PluginContext())
    assert value(found, "anything") == 7.0
    assert found.function_for(None).name.endswith("my_reward.py:compute_score")
    assert found.function_for(None).file == str(file)


def test_a_users_function_with_other_parameters_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("def compute_score(answer):\n    return 7.0\n")
    with pytest.raises(
        ConfigError, match=r"my_reward.py:compute_score requires a parameter 'answer'"
    ):
        configured_functions(RewardSection(function=PluginSection(path=str(file))), PluginContext())


def test_functions_of_a_managers_own_are_checked_and_need_no_source() -> None:
    found = functions(manager=PluginSection(name="own"))
    check_sources(found, [row(0), row(1, "anything")])
    with pytest.raises(DataError, match=r"row 1: fours.*row: 3 is odd"):
        check_sources(found, [row(0), row(1, truth=3)])


def test_a_function_on_groups_needs_a_manager_that_brings_groups(tmp_path: Path) -> None:
    file = tmp_path / "ranks.py"
    file.write_text(
        "def compute_score(solution_strs):\n    return [1.0] * len(solution_strs)\n\n"
        "compute_score.unit = 'group'\n"
    )
    rank = PluginSection(path=str(file))
    for manager, fits in (("naive", False), ("group", True)):
        section = RewardSection(function=rank, manager=PluginSection(name=manager))
        found = configured_functions(section, PluginContext())
        if fits:
            check_sources(found, [row(0)])
            continue
        with pytest.raises(
            ConfigError, match=r"name=naive .*ranks\.py:compute_score can score only whole"
        ) as error:
            check_sources(found, [row(0)])
        assert "set reward.manager.name=group" in str(error.value)


def test_files_of_functions_are_named_for_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("def compute_score(solution_str):\n    return 7.0\n")
    section = RewardSection(
        function=PluginSection(path=str(file)), functions={"a": PluginSection(name="fives")}
    )
    found = configured_functions(section, PluginContext(), loader=Both())
    assert [(ref.path, ref.attribute) for ref in found.files()] == [(str(file), "compute_score")]


class Both(Shelf):
    """A `Shelf` that also loads functions from files."""

    def selected(self, section: PluginSection, context: PluginContext) -> RewardFunction:
        if section.path is None:
            return super().selected(section, context)
        return InstalledFunctions().selected(section, context)
