"""Parallel: this rank's coordinates in Megatron's parallel layout, and Megatron's process groups.

Ranks are in the order of the mesh: dp outermost, then pp, cp, and tp; tensor-parallel ranks are neighbours. Expert parallelism
divides the data- and context-parallel ranks. Megatron allows one layout per process.
"""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist

from dovetail.dispatch import Mesh
from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.needs import imported

ORDER = "tp-cp-ep-pp-dp"
"""The order of axes in Megatron's notation; the first axis varies fastest."""
_users = 0


class Parallel:
    """One rank's coordinates and process groups.

    Attributes:
        tp, pp, cp, ep: the sizes of the tensor-, pipeline-, context- and expert-parallel axes.
        tp_rank, pp_rank, cp_rank, ep_rank: this rank's coordinates.
        dp_rank: this rank's index among the data-parallel ranks.
        state: Megatron's module `parallel_state`, with the process groups.
    """

    def __init__(self, config: MegatronConfig, context: PluginContext) -> None:
        """Create Megatron's process groups, or reuse those of an engine that was started before.

        Raises:
            ConfigError: the mesh is not that of the config, or another engine of this process has another layout.
        """
        self.tp, self.pp = config.tensor_parallel_size, config.pipeline_parallel_size
        self.cp, self.ep = config.context_parallel_size, config.expert_parallel_size
        mesh = context.mesh or Mesh()
        _check_mesh(config, mesh)
        config.shards(mesh.size)
        _join_alone(torch.device(context.device), mesh.size)
        self.state = _joined(self, mesh.size)
        global _users  # noqa: PLW0603 - see `leave`
        _users += 1
        where = mesh.coordinates(context.rank)
        self.tp_rank, self.pp_rank, self.cp_rank = where["tp"], where["pp"], where["cp"]
        self.dp_rank = where["dp"]
        self.ep_rank = int(self.state.get_expert_model_parallel_rank())
        self._joined = True

    def leave(self) -> None:
        """Release the layout. A new engine may have another layout once no engine of this process uses this layout."""
        global _users  # noqa: PLW0603 - Megatron's own layout is one a process
        if self._joined:
            self._joined = False
            _users -= 1
            if not _users:
                _part(self.state)

    @property
    def first_stage(self) -> bool:
        """Whether this rank belongs to the first pipeline stage, which embeds tokens."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank belongs to the last pipeline stage, which scores tokens."""
        return self.pp_rank == self.pp - 1

    @property
    def tp_group(self) -> Any:
        """The group of ranks that divide each weight matrix."""
        return self.state.get_tensor_model_parallel_group()

    @property
    def cp_group(self) -> Any:
        """The group of ranks among which each pack (packed micro-batch) is divided."""
        return self.state.get_context_parallel_group()

    @property
    def pp_group(self) -> Any:
        """The group of ranks that hold the stages of one copy of the model."""
        return self.state.get_pipeline_model_parallel_group()

    def collection(self) -> Any:
        """Return the process groups for Megatron's pipeline schedule."""
        groups = imported("megatron.core.process_groups_config").ProcessGroupCollection()
        groups.tp, groups.pp, groups.cp = self.tp_group, self.pp_group, self.cp_group
        groups.embd = self.state.get_embedding_group(check_initialized=False)
        groups.pos_embd = self.state.get_position_embedding_group(check_initialized=False)
        groups.dp_cp = self.replicas(expert=False)
        return groups

    def replicas(self, *, expert: bool) -> Any:
        """Return the group of ranks that hold copies of a parameter, over which the parameter's gradients are summed.

        Args:
            expert: whether the parameter belongs to an expert.
        """
        if expert:
            return self.state.get_expert_data_parallel_group()
        return self.state.get_data_parallel_group(with_context_parallel=True)


def _check_mesh(config: MegatronConfig, mesh: Mesh) -> None:
    for axis, size in config.mesh_axes().items():
        if mesh.axis_size(axis) != size:
            raise ConfigError(
                f"the config needs {axis}={size}, but the engine's mesh is {mesh.described()}",
                hint="make the mesh with the axes that the config's mesh_axes() names",
            )
    order = [axis for axis, size in mesh.axes.items() if size > 1]
    if order != [axis for axis in ("dp", "pp", "cp", "tp") if axis in order]:
        raise ConfigError(
            f"the axes of the engine's mesh are in the order {', '.join(order)}; expected dp, pp, cp, tp",
            hint="make the mesh with Mesh.over(ranks, **config.mesh_axes())",
        )


def _joined(wanted: Parallel, ranks: int) -> Any:
    state = imported("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(
            tensor_model_parallel_size=wanted.tp,
            pipeline_model_parallel_size=wanted.pp,
            context_parallel_size=wanted.cp,
            expert_model_parallel_size=wanted.ep,
            # With this order of axes and several stages, the experts' groups must include the context-parallel ranks. Models
            # with experts can't have both pipeline and context parallelism.
            expert_tensor_parallel_size=wanted.tp * (wanted.cp if wanted.pp > 1 else 1),
            order=ORDER,
            create_gloo_process_groups=False,
        )
        return state
    there = {
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
    }
    for axis, size in there.items():
        if size != getattr(wanted, axis):
            raise ConfigError(
                f"an engine on these {ranks} ranks needs {axis}={getattr(wanted, axis)}, but an earlier one set up {axis}={size}; "
                "all megatron engines on the same ranks must have one layout",
                hint="give all megatron engines of a pool the same layout, or each engine a pool of its own",
            )
    return state


def _part(state: Any) -> None:
    """Destroy Megatron's layout and its process groups: Megatron only drops them, so that their threads and buffers would stay."""
    groups = [g for g in state._global_process_group_list or () if g is not None]  # noqa: SLF001
    state.destroy_model_parallel()
    # If the default group was destroyed before, these groups were destroyed with it.
    known = dist.distributed_c10d._world.pg_map  # noqa: SLF001
    for group in groups:
        if group in known:
            dist.destroy_process_group(group)


def _join_alone(device: torch.device, ranks: int) -> None:
    """Create a default process group if the run has a single rank and none exists, since Megatron needs one; no port is opened."""
    if ranks > 1 or dist.is_initialized():
        return
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
