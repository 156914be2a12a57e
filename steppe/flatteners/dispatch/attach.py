"""PipelinedLLEP joins a live Hugging Face MoE model and leaves it again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from steppe.core.policy import Conflict
from steppe.flatteners.dispatch import auxiliary, recognise, router, shared
from steppe.flatteners.dispatch.budget import DispatchPolicy
from steppe.flatteners.dispatch.exchange import pipelined_llep
from steppe.flatteners.dispatch.plan import check_divides
from steppe.flatteners.dispatch.profiles import forced_routes
from steppe.flatteners.dispatch.reference import plain_expert_parallel
from steppe.flatteners.dispatch.routes import Session
from steppe.flatteners.dispatch.telemetry import Telemetry, diagnose
from steppe.flatteners.dispatch.workspace import WorkspacePool
from steppe.runtime import collectives, scopes

__all__ = ["MESH", "Attached", "attach", "attach_plain", "conflicts", "diagnose"]

MESH: Final = ("expert", ("efsdp", "ep"))
EXPERT_AXIS: Final = "ep"
Program = Callable[..., torch.Tensor]


class Attached:
    """The experts of a model behind PipelinedLLEP; one pool of workspaces for all layers.

    `ties_pinned`: set it when the blocks run under SCO's checkpoint, which pins the router's top-k. `sums_shares`: set
    it where losses and gradients of ranks are summed, not averaged: the model's auxiliary loss is this rank's share
    then. `forced`: a routing profile of `profiles.py` ("balanced", "95/1") instead of the router's choice, for
    benchmarks.
    """

    def __init__(self, model: nn.Module, policy: DispatchPolicy, pool: WorkspacePool, mesh: Any = None) -> None:
        self.model, self.policy, self.pool, self.mesh = model, policy, pool, mesh
        self.sessions: dict[str, Session] = {}
        self.experts: dict[str, nn.Module] = {}
        self.ties_pinned = self.sums_shares = False
        self.forced: str | None = None
        self._undo: list[Callable[[], object]] = []

    def detach(self) -> None:
        """The model's own forward again. Parameters keep the placement they have."""
        while self._undo:
            self._undo.pop()()
        self.pool.close()

    def stats(self) -> dict[str, Any]:
        """One `LayerStats` a layer, and the counters of the pool."""
        return {
            "layers": [session.telemetry.read() for session in self.sessions.values()],
            "num_ranks": max((s.num_ranks for s in self.sessions.values()), default=1),
            "ties_pinned": self.ties_pinned,
            "counters": dict(self.pool.counters),
        }

    def shard_complement(self, mesh: Any = None, **options: Any) -> None:
        """FSDP2 over the axis that complements the expert axis, experts by experts; call it before the blocks'.

        `mesh` is that axis; by default, and for a mesh of two axes, it is taken from the mesh that `attach` was given
        (parameters and FSDP2 have to share one). Gradients are summed, never divided: the loss is divided by the global
        number of tokens.
        """
        axis = mesh if mesh is not None and mesh.ndim == 1 else _complement(self.mesh)
        if axis is None:
            return
        for module in self.experts.values():
            sharded: FSDPModule = fully_shard(module, mesh=axis, **options)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def auxiliary_loss(
        self, router_logits: Any, *, attention_mask: torch.Tensor | None = None, group: collectives.Group = None
    ) -> torch.Tensor:
        """This rank's share of the router's load-balancing loss from global counts; see `router.auxiliary_loss`."""
        config = self.model.config.get_text_config()
        return router.auxiliary_loss(
            router_logits, config.num_experts_per_tok, attention_mask=attention_mask, group=group
        )

    def update_router_bias(self, rate: float = 1e-3, *, group: collectives.Group = None) -> int:
        """Once per optimizer step: move every `e_score_correction_bias` by the global counts since the last call.

        `group` holds the ranks whose tokens count (all of them). Returns the number of routers updated.
        """
        updated = 0
        for block, module in recognise.blocks_of(self.model, self.experts):
            bias = getattr(recognise.router_of(block), "e_score_correction_bias", None)
            if bias is None:
                continue
            name = next(n for n, m in self.experts.items() if m is module)
            session = self.sessions[name]
            counts = torch.zeros(len(bias), dtype=torch.int64, device=bias.device)
            if (seen := session.telemetry.take_counts()) is not None:
                counts += torch.from_numpy(seen).to(bias.device)
            collectives.all_reduce(counts, group)
            bias.copy_(router.updated_bias(bias, counts.cpu().numpy(), rate))
            updated += 1
        return updated

    def _run_by(self, name: str, module: Any, program: Program) -> None:
        """Let `program(rows, ids, weights, experts)` be the module's forward."""
        self.experts[name] = module
        read = recognise.reader(module)

        def forward(hidden_states: torch.Tensor, *routes: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            ids, weights = _routes(routes, named)
            return program(rows, ids, weights, read(_local)).view(hidden_states.shape)

        self._undo.append(shared.replace_forward(module, forward))

    def _join(self, name: str, module: Any, group: collectives.Group, transfers: collectives.Group) -> None:
        session = Session(self.policy, group, transfers, self.pool, Telemetry(layer=name))
        self.sessions[name] = session

        def program(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Any) -> torch.Tensor:
            session.telemetry.counting = module.training
            if self.forced is not None:
                ids, weights = _forced(self.forced, ids, weights, experts.num_experts * session.num_ranks)
            return pipelined_llep(rows, ids, weights, experts, session=session)

        self._run_by(name, module, program)


def attach(
    model: nn.Module, policy: DispatchPolicy, mesh: Any = None, *, pool: WorkspacePool | None = None
) -> Attached:
    """Run every expert module of `model` through PipelinedLLEP; shared experts run before the routed ones.

    `mesh`: a DeviceMesh with an axis named "ep" (or one axis without a name) shards the experts over it, Shard(0);
    call `shard_complement` for FSDP2 over the other axis. Without such an axis the experts stay where they are.

    The model's own auxiliary loss (`output_router_logits`) takes the frequencies of all ranks of the mesh, see
    `router.batch_loss`: averaged over ranks by their tokens it is the whole batch's (or summed, with `sums_shares`).

    Raises: ConfigError for a model whose experts are not recognised, or E not a multiple of E_p.
    """
    attached, axis, group = _start(model, policy, mesh, pool)
    transfers = _transfer_group(mesh, axis) if group is not None else None
    experts = recognise.expert_modules(model)
    for name, module in experts.items():
        attached._join(name, module, group, transfers)
    for block, _ in recognise.blocks_of(model, experts):
        if (name := recognise.shared_expert(block)) is not None:
            attached._undo.append(shared.run_first(block, name))
    return attached


def attach_plain(model: nn.Module, mesh: Any) -> Attached | auxiliary.SharedCounts:
    """Plain expert parallelism over the mesh's expert axis: one all-to-all there and back, everything saved.

    Where that axis has one rank the experts stay as they are. The auxiliary loss is as under `attach`.
    Raises: as `attach`.
    """
    expert_axis = _expert_axis(mesh)
    if expert_axis is None or expert_axis.size() == 1:
        return auxiliary.SharedCounts(model, _groups(mesh))
    attached, _, group = _start(model, DispatchPolicy(), mesh, None)
    for name, module in recognise.expert_modules(model).items():
        attached._run_by(name, module, scopes.region("dispatch", partial(plain_expert_parallel, group=group)))
    return attached


def _start(
    model: nn.Module, policy: DispatchPolicy, mesh: Any, pool: WorkspacePool | None
) -> tuple[Attached, Any, collectives.Group]:
    """Shard the experts over the expert axis; gives the handle, the axis and its group."""
    experts = recognise.expert_modules(model)
    axis = _expert_axis(mesh)
    group = None if axis is None or axis.size() == 1 else axis.get_group()
    for module in experts.values():
        check_divides(module.gate_up_proj.shape[0], collectives.size(group))
    if axis is not None:
        for module in experts.values():
            _shard(module, axis)
    attached = Attached(model, policy, pool or WorkspacePool(), mesh)
    attached._undo.append(auxiliary.use_counts_of_all_ranks(model, _groups(mesh), lambda: attached.sums_shares))
    return attached, axis, group


def _groups(mesh: Any) -> list[collectives.Group]:
    """One group an axis: a sum over all of them is one over all ranks of the mesh."""
    return [] if mesh is None else [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]


def conflicts(*live: Any) -> tuple[Conflict, ...]:
    """Models whose experts another piece of software already runs or wraps."""
    found: list[Conflict] = []
    for model in (item for item in live if isinstance(item, nn.Module)):
        if hasattr(model, "_orig_mod"):
            found.append(Conflict("torch.compile around the whole model", "compile attention and norms of each block"))
        for name, module in model.named_modules():
            if getattr(module, "_is_expert_parallel", False):
                found.append(
                    Conflict(
                        f"{name} is expert-parallel by transformers",
                        "load with ep_implementation='pipelined_llep' (dispatch/registry.py), or without ep_size",
                    )
                )
            if name.endswith("experts") and hasattr(module, "base_layer"):
                found.append(Conflict(f"{name} is wrapped by an adapter", "merge the adapter, or leave dispatch off"))
    return tuple(found)


def _routes(routes: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Expert ids and route weights, by place or by the names that transformers' families give them."""
    names = ("top_k_index", "router_indices"), ("top_k_weights", "routing_weights")
    rest = (named[name] for pair in names[len(routes) :] for name in pair if name in named)
    return (*routes, *rest)


def _forced(
    profile: str, ids: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The profile's ids, and weights 1/k that still hang on the router's."""
    forced = forced_routes(profile, num_tokens=len(ids), num_experts=num_experts, num_choices=ids.shape[1])
    return torch.from_numpy(forced).to(ids.device), weights * 0 + 1 / ids.shape[1]


def _expert_axis(mesh: Any) -> Any | None:
    """The sub-mesh over which experts are sharded."""
    if mesh is None:
        return None
    names = mesh.mesh_dim_names
    if names is None:
        return mesh if mesh.ndim == 1 else None
    return mesh[EXPERT_AXIS] if EXPERT_AXIS in names else None


def _complement(mesh: Any) -> Any | None:
    """The axis beside the expert axis; None where there is none."""
    if mesh is None or mesh.ndim != 2 or EXPERT_AXIS not in (mesh.mesh_dim_names or ()):
        return None
    return mesh[next(name for name in mesh.mesh_dim_names if name != EXPERT_AXIS)]


def _transfer_group(mesh: Any, axis: Any) -> collectives.Group:
    """A process group of their own for travelling weights; every rank makes all groups, in the same order."""
    mine = None
    columns = mesh.mesh.movedim((mesh.mesh_dim_names or (EXPERT_AXIS,)).index(EXPERT_AXIS), -1)
    own = set(axis.mesh.flatten().tolist())
    device = torch.device(mesh.device_type)
    for ranks in columns.reshape(-1, axis.size()).tolist():
        group = collectives.new_group(ranks)
        if set(ranks) == own:
            mine = group
    collectives.warm_up(mine, device)
    return mine


def _shard(module: nn.Module, axis: Any) -> None:
    """Parameters as DTensors, Shard(0) over the expert axis; those that are already keep their placement."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not isinstance(parameter, DTensor):
            placed = distribute_tensor(parameter.detach(), axis, [Shard(0)])
            module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part, tied to autograd."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
