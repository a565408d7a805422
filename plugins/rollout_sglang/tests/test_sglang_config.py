"""Error messages on keys that users know from other engines or from SGLang itself."""

from __future__ import annotations

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("mode", "leave it out"),
        ("mem_fraction_static", "SGLang's mem_fraction_static is gpu_memory_utilization here"),
        ("pipeline_parallel_size", "; use tensor_parallel_size"),
    ],
)
def test_a_key_of_another_engines_says_what_it_is_here(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"1 problem.*the config") as caught:
        config_from_mapping({"model": {"path": "x"}, "rollout": {"name": "sglang", key: 1}})
    assert f"rollout.{key} = 1 (mapping): unknown key; " in str(caught.value)
    assert said in str(caught.value)
