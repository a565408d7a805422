"""Runs with images: every engine must take them, and a batch names them without holding them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.errors import PlanError
from dovetail.planning.images import check_images


def engine(title: str, *capabilities: str) -> Any:
    return SimpleNamespace(title=title, cls=SimpleNamespace(capabilities=frozenset(capabilities)))


def test_an_engine_without_images_is_named_beside_one_that_has_them() -> None:
    able, blind = engine("rollout 'hf'", "images"), engine("engine 'megatron'", "lora")
    with pytest.raises(PlanError, match=r"engine 'megatron' lacks .*'images'; rollout 'hf' has it"):
        check_images({"rollout": able, "actor.engine": blind}, critic=False)
    with pytest.raises(PlanError, match="rollout 'sglang' lacks the capability 'images'"):
        check_images({"rollout": engine("rollout 'sglang'"), "actor.engine": blind}, critic=False)


def test_a_critic_counts_only_where_there_is_one() -> None:
    able, blind = engine("rollout 'hf'", "images"), engine("engine 'table'")
    chosen = {"rollout": able, "actor.engine": able, "critic.engine": blind}
    check_images(chosen, critic=False)
    with pytest.raises(PlanError, match="engine 'table'"):
        check_images(chosen, critic=True)
