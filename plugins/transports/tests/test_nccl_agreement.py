"""The properties that processes compare before they form a group of `nccl`, and processes that can't form one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.errors import WeightSyncError
from dovetail_transports.nccl.agreement import agree, described

OURS: dict[str, Any] = {"backend": ["nccl", 2, 28], "machine": "a", "memory": "-2"}


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that returns a process's properties for a value of NCCL_CUMEM_ENABLE; None leaves the variable unset."""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))

    def of(value: str | None) -> dict[str, Any]:
        if value is None:
            monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
        else:
            monkeypatch.setenv("NCCL_CUMEM_ENABLE", value)
        return described("nccl")

    return of


@pytest.mark.parametrize("theirs", [None, "", "-2", "1"])
def test_processes_that_may_share_memory_in_one_way_are_a_group(
    memory_of: Any, theirs: Any
) -> None:
    agree(memory_of(None), [memory_of(theirs)])
    agree(memory_of("0"), [memory_of("0")])


@pytest.mark.parametrize(("ours", "theirs"), [(None, "0"), ("1", "0"), ("0", None)])
def test_on_one_machine_nobody_shares_memory_as_another_can_not(
    memory_of: Any, ours: str | None, theirs: str | None
) -> None:
    with pytest.raises(WeightSyncError, match="NCCL_CUMEM_ENABLE") as found:
        agree(memory_of(ours), [memory_of(ours), memory_of(theirs)])
    assert "a receiver has" in found.value.message
    assert "-2" in str(found.value.hint)


def test_processes_of_several_machines_share_nothing_but_those_of_each_do() -> None:
    elsewhere = OURS | {"machine": "b", "memory": "0"}
    agree(OURS, [elsewhere, elsewhere])
    with pytest.raises(WeightSyncError, match=r"NCCL_CUMEM_ENABLE=0\b"):
        agree(OURS, [elsewhere | {"memory": "1"}, elsewhere])


def test_another_nccl_is_refused_with_both_versions() -> None:
    with pytest.raises(WeightSyncError, match=r"nccl 2\.27.*sender .*nccl 2\.28"):
        agree(OURS, [OURS | {"backend": ["nccl", 2, 27]}])
    with pytest.raises(WeightSyncError, match="uses nothing"):
        agree(OURS, [{}])


def test_a_receiver_that_says_nothing_of_its_memory_is_taken() -> None:
    agree(OURS, [{"backend": OURS["backend"]}])
    agree(described("gloo"), [described("gloo")])
