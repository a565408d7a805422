"""Placement: pools of a runtime's config, meshes of the groups, replicas of the rollout, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import attrs
import pytest
import torch

from dovetail.config.builtin import InlineConfig
from dovetail.errors import PlanError
from dovetail.interfaces import PluginRef
from dovetail.interfaces.stage import PlanFacts
from dovetail.planning.models import ModelRole
from dovetail.planning.placement import place
from dovetail.sections import (
    EngineSection,
    PlannedAdapter,
    Pool,
    RolloutSection,
    RuntimeSection,
    TrainingSection,
)
from dovetail_rollouts import RolloutsSource
from dovetail_rollouts.placement import default_transport
from dovetail_serving import AdaptedSection


@attrs.frozen(kw_only=True)
class Cluster(RuntimeSection):
    ranks: int = 4
    nodes: int = 1
    accelerators: bool = True
    apart: bool = False

    @property
    def in_process(self) -> bool:
        return False

    def pools_for(self, roles: Sequence[str]) -> tuple[Pool, ...]:
        groups = (
            [("rollout",), tuple(r for r in roles if r != "rollout")]
            if self.apart
            else [tuple(roles)]
        )
        return tuple(
            Pool(
                name="+".join(group) if self.apart else "all",
                roles=group,
                nodes=self.nodes,
                ranks_per_node=self.ranks,
                accelerators=self.accelerators,
            )
            for group in groups
        )

    def default_transport(self, *, joined: bool = False) -> str:
        return "disk"


@attrs.frozen(kw_only=True)
class Parallel(EngineSection):
    cp: int = 1
    sends: Literal["full", "adapter"] = "full"
    adapter: PlannedAdapter | None = None

    def mesh_axes(self) -> Mapping[str, int]:
        return {"cp": self.cp}

    def weight_kind(self) -> Literal["full", "adapter"]:
        return self.sends

    def planned_adapter(self) -> PlannedAdapter:
        return self.adapter or super().planned_adapter()


@attrs.frozen(kw_only=True)
class Wide(RolloutSection):
    wide: int = 1
    here: bool = True
    servers: int = 0

    @property
    def in_process(self) -> bool:
        return self.here

    @property
    def joined(self) -> int:
        return self.servers

    def ranks_per_replica(self) -> int:
        return self.wide

    def adapter_problem(self, rank: int | None) -> str | None:
        return "has no room: make some" if self.wide == 7 else None


def placed(
    runtime: RuntimeSection,
    rollout: RolloutSection | None = None,
    transport: frozenset[str] = frozenset(),
    takes: frozenset[str] = frozenset(),
    sends: Literal["full", "adapter"] = "full",
    adapter: PlannedAdapter | None = None,
    **engines: int,
) -> Any:
    config: Any = SimpleNamespace(
        runtime=runtime, rollout=rollout or RolloutSection(), role_key=lambda role: role
    )
    chosen: Any = {
        "source": SimpleNamespace(cls=RolloutsSource, config=None),
        "actor.engine": SimpleNamespace(
            ref=SimpleNamespace(name="e"),
            config=Parallel(sends=sends if "actor" in engines else "full", adapter=adapter),
        ),
        "runtime": SimpleNamespace(ref=SimpleNamespace(name="mine")),
        "rollout": SimpleNamespace(
            ref=SimpleNamespace(name="ours"), cls=SimpleNamespace(capabilities=takes)
        ),
        "rollout.weight_transport": SimpleNamespace(
            ref=SimpleNamespace(name="theirs"), cls=SimpleNamespace(capabilities=transport)
        ),
    }
    models = [
        ModelRole(
            role=role,
            engine=PluginRef(
                kind="engine", name="e", config=Parallel(cp=cp, sends=sends, adapter=adapter)
            ),
            key=role,
            path="p",
            because="",
            training=TrainingSection(),
        )
        for role, cp in engines.items()
    ]
    return place(PlanFacts(config=config, plugins=chosen, updates_per_step=1), models)


def test_one_process_holds_everything() -> None:
    placement, (actor,) = placed(RuntimeSection(), actor=1)
    assert placement.in_process
    assert placement.source.replicas == 1
    assert actor.mesh.size == 1
    assert placement.lines([actor]) == ["every role in one worker (mine)"]


def test_an_engine_in_processes_of_its_own_is_named_as_such() -> None:
    apart, (actor,) = placed(RuntimeSection(), Wide(wide=2, here=False, replicas=3), actor=1)
    training, rollout = apart.lines([actor])
    assert training == "actor in this process (mine)"
    assert rollout == "rollout × 3, each with an engine of 2 ranks in processes of its own"
    joining, _ = placed(RuntimeSection(), Wide(here=False, servers=2), actor=1)
    assert joining.lines([actor])[1] == "rollout × 2, each an engine that is already running"


def test_dp_takes_what_the_engines_axes_leave() -> None:
    placement, (actor, critic) = placed(Cluster(), actor=2, critic=1)
    assert (actor.mesh.axis_size("dp"), actor.mesh.axis_size("cp")) == (2, 2)
    assert critic.mesh.axis_size("dp") == 4
    (line,) = placement.lines([actor, critic])
    assert line == (
        "pool all (mine): 4 accelerators: actor (dp=2 × cp=2), critic (dp=4), rollout × 4"
    )


def test_a_mesh_that_does_not_multiply_out_names_role_and_pool() -> None:
    with pytest.raises(PlanError, match=r"placed on pool 'all'.*cp=3"):
        placed(Cluster(), actor=3)


def test_replicas_fill_the_pool_unless_they_are_named() -> None:
    assert placed(Cluster(), Wide(wide=2), actor=1)[0].source.replicas == 2
    assert placed(Cluster(), Wide(wide=2, replicas=1), actor=1)[0].source.replicas == 1


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        (Wide(wide=8), "takes 8 ranks"),
        (Wide(wide=2, replicas=3), "replicas=3 needs 6 accelerators"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(rollout: RolloutSection, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        placed(Cluster(), rollout, actor=1)


def test_cpu_replicas_may_outnumber_the_ranks() -> None:
    assert placed(Cluster(accelerators=False), Wide(replicas=9), actor=1)[0].source.replicas == 9


def test_a_transport_within_one_process_does_not_leave_it() -> None:
    within = frozenset({"in_process"})
    with pytest.raises(PlanError, match=r"'theirs'.*one process"):
        placed(Cluster(), transport=within, actor=1)
    assert placed(RuntimeSection(), transport=within, actor=1)
    # An engine may have processes of its own, though the runtime has none.
    with pytest.raises(PlanError, match=r"rollout 'ours' loads.*its own"):
        placed(RuntimeSection(), Wide(here=False), transport=within, actor=1)


def test_ends_that_meet_need_two_processes() -> None:
    meet = frozenset({"across_processes", "ends_meet"})
    with pytest.raises(PlanError, match="needs trainer"):
        placed(RuntimeSection(), transport=meet, actor=1)
    assert placed(RuntimeSection(), Wide(here=False), transport=meet, actor=1)[0].source.ends_meet
    assert placed(Cluster(), transport=meet, actor=1)[0].source.ends_meet
    assert not placed(Cluster(), transport=frozenset({"across_processes"}), actor=1)[
        0
    ].source.ends_meet


def test_the_default_transport_follows_from_who_computes_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def default(rollout: RolloutSection, runtime: RuntimeSection | None = None) -> str:
        config: Any = SimpleNamespace(runtime=runtime or RuntimeSection(), rollout=rollout)
        return default_transport(config)

    def accelerator(kind: str | None) -> None:
        here = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: here)

    accelerator(None)
    assert default(RolloutSection()) == "in_process"
    assert default(Wide(here=False)) == "shared_memory"
    assert default(Wide(here=False, servers=2)) == "shared_memory"
    assert default(Wide(here=False), Cluster()) == "disk"
    accelerator("xpu")  # of which no transport hands memory from process to process
    assert default(RolloutSection()) == "in_process"
    assert default(Wide(here=False)) == "shared_memory"
    assert default(Wide(here=False, servers=2)) == "nccl"
    entries = [SimpleNamespace(name="xpu_ipc")]
    index = SimpleNamespace(entries=lambda kind: entries)
    monkeypatch.setattr("dovetail_rollouts.placement.default_index", lambda: index)
    assert default(Wide(here=False)) == "xpu_ipc"
    assert default(Wide(here=False), InlineConfig(device="cpu")) == "shared_memory"


def test_replicas_that_join_engines_take_no_ranks_and_are_as_many_as_those() -> None:
    assert placed(Cluster(), Wide(wide=8, servers=3), actor=1)[0].source.replicas == 3
    assert placed(RuntimeSection(), Wide(servers=3, replicas=3), actor=1)[0].source.replicas == 3
    with pytest.raises(PlanError, match=r"replicas=2, but .* connects to 3 engines"):
        placed(Cluster(), Wide(servers=3, replicas=2), actor=1)


def test_offloading_asks_for_an_engine_that_sleeps() -> None:
    with pytest.raises(PlanError, match="lacks the capability 'sleep'"):
        placed(RuntimeSection(), RolloutSection(offload=True), actor=1)
    sleeps = frozenset({"sleep"})
    assert placed(RuntimeSection(), RolloutSection(offload=True), takes=sleeps, actor=1)


def test_an_adapter_goes_only_to_a_rollout_that_can_apply_one() -> None:
    with pytest.raises(PlanError, match=r"rollout 'ours' can't apply.*'lora'") as refused:
        placed(RuntimeSection(), sends="adapter", actor=1)
    assert refused.value.hint is not None
    assert "sync: merged" in refused.value.hint
    lora = frozenset({"lora"})
    assert placed(RuntimeSection(), sends="adapter", takes=lora, actor=1)
    with pytest.raises(PlanError, match=r"rollout 'ours' has.*some"):
        placed(RuntimeSection(), Wide(wide=7), sends="adapter", takes=lora, actor=1)
    # A critic's weights go nowhere.
    assert placed(RuntimeSection(), sends="adapter", critic=1)


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (PlannedAdapter(rank=8, dora=True), "rollout 'ours' can't apply.*DoRA adapters"),
        (
            PlannedAdapter(rank=8, target_modules=("model.embed_tokens", "q_proj")),
            r"rollout 'ours' can't apply.*embeddings \(embed_tokens\)",
        ),
        (PlannedAdapter(rank=16), "ranks up to 8,.*adapter.*16"),
    ],
)
def test_an_adapter_that_a_serving_engine_does_not_apply_is_refused_by_the_plan(
    adapter: PlannedAdapter, says: str
) -> None:
    def plan(adapter: PlannedAdapter) -> Any:
        return placed(
            RuntimeSection(),
            AdaptedSection(max_adapter_rank=8),
            sends="adapter",
            takes=frozenset({"lora"}),
            adapter=adapter,
            actor=1,
        )

    with pytest.raises(PlanError, match=says) as refused:
        plan(adapter)
    assert "sync: merged" in (refused.value.hint or "")
    assert plan(PlannedAdapter(rank=8, target_modules=("q_proj",)))


LOCAL, FAR = frozenset({"on_each_machine", "ends_meet"}), frozenset({"across_machines"})


@pytest.mark.parametrize(
    ("transport", "runtime", "rollout", "refused"),
    [
        (LOCAL, Cluster(nodes=2), Wide(), None),
        (FAR, Cluster(nodes=2, apart=True), Wide(), None),
        (FAR, Cluster(nodes=2), Wide(servers=2), None),
        (LOCAL, Cluster(apart=True), Wide(), None),
        (LOCAL, Cluster(nodes=2, apart=True), Wide(), "the rollout in pool 'rollout'"),
        (LOCAL, Cluster(nodes=2), Wide(servers=2), "engines that are already running"),
        (frozenset(), Cluster(nodes=2), Wide(), r"pool 'all' \(2 nodes × 4 accelerators\)"),
    ],
)
def test_a_transport_within_a_machine_serves_several_where_each_has_a_rank_that_sends(
    transport: frozenset[str], runtime: Cluster, rollout: Wide, refused: str | None
) -> None:
    if refused is None:
        placement, _ = placed(runtime, rollout, transport=transport, actor=1)
        assert placement.source.on_each_machine == (transport is LOCAL)
        return
    with pytest.raises(PlanError, match=refused) as caught:
        placed(runtime, rollout, transport=transport, actor=1)
    assert "('disk' is then used)" in str(caught.value.hint)


def test_a_collective_between_accelerators_needs_others_for_the_rollout() -> None:
    collective = FAR | {"ends_meet"}
    with pytest.raises(PlanError, match="rollout and the actor share") as caught:
        placed(Cluster(), Wide(), transport=collective, actor=1)
    assert "runtime.pools" in str(caught.value.hint)
    for cluster in (Cluster(apart=True), Cluster(accelerators=False)):
        assert placed(cluster, Wide(), transport=collective, actor=1)


def test_a_replica_lies_on_one_machine() -> None:
    with pytest.raises(PlanError, match="two machines") as caught:
        placed(Cluster(nodes=2), Wide(wide=3), transport=FAR, actor=1)
    assert "divides 4" in str(caught.value.hint)
    alone = Cluster(nodes=2, accelerators=False)
    assert placed(alone, Wide(wide=3), transport=FAR, actor=1)[0].source.replicas == 2
