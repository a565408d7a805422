"""Runs with images: every engine must take them, and a batch names them without holding them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import PlanError
from dovetail.planning.images import check_images
from dovetail.planning.plan import make_plan
from dovetail_sdk.testing import TableEngine, temporary_plugins


def engine(title: str, *capabilities: str) -> Any:
    return SimpleNamespace(title=title, cls=SimpleNamespace(capabilities=frozenset(capabilities)))


def test_an_engine_without_images_is_named_beside_one_that_has_them() -> None:
    able, blind = engine("rollout 'hf'", "images"), engine("engine 'megatron'", "lora")
    with pytest.raises(PlanError, match=r"'megatron' lacks.*'images'; rollout 'hf'"):
        check_images([able, blind])
    with pytest.raises(PlanError, match=r"'sglang' lacks.*capability 'images'"):
        check_images([engine("rollout 'sglang'"), blind])


class Blind(TableEngine):
    """Takes no images."""

    name = "blind"


def test_a_critic_counts_only_where_there_is_one() -> None:
    config = {"model": {"path": "tiny"}, "critic": {"engine": "blind"}}
    with temporary_plugins(Blind):
        make_plan(config_from_mapping(config, []).config, images=True)
        with pytest.raises(PlanError, match="engine 'blind'"):
            make_plan(config_from_mapping(config, ["algorithm.advantage=gae"]).config, images=True)
