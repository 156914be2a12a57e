"""From router output to the tables of a pass: one gather of counts, one copy to the host, then integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from steppe.core.errors import ShapeError
from steppe.flatteners.dispatch.budget import TILE_ELEMENTS, DispatchPolicy, LayerShape, chunk_tokens
from steppe.flatteners.dispatch.plan import Ints, check_divides, plan_experts
from steppe.flatteners.dispatch.schedule import (
    Layout,
    Receives,
    Sends,
    choice_sizes,
    lay_out,
    receive_tables,
    send_tables,
)
from steppe.flatteners.dispatch.telemetry import Telemetry
from steppe.flatteners.dispatch.weights import ExpertForm
from steppe.flatteners.dispatch.workspace import WorkspacePool
from steppe.runtime import collectives


@dataclass
class Session:
    """What all calls of one layer share: how, with whom, in which buffers. The pool may serve many sessions.

    `transfers` is the process group on which expert weights travel; the exchange's own group if None.
    """

    policy: DispatchPolicy = field(default_factory=DispatchPolicy)
    group: collectives.Group = None
    transfers: collectives.Group = None
    pool: WorkspacePool = field(default_factory=WorkspacePool)
    telemetry: Telemetry = field(default_factory=Telemetry)

    @property
    def num_ranks(self) -> int:
        return collectives.size(self.group)

    @property
    def rank(self) -> int:
        return collectives.rank(self.group)


@dataclass
class Routes:
    """Everything of one forward that its backward replays: the tables, and the order of the own routes.

    `order` [N*k] int32 holds route numbers (choice * N + token) sorted by (expert, choice, token).
    """

    layer: LayerShape
    layout: Layout
    sends: Sends
    receives: Receives
    order: torch.Tensor
    by_choice: Ints  # [E, k]
    rank: int
    native_left: list[int]
    learns: bool  # whether experts have gradients, on any rank

    @cached_property
    def choice_sizes(self) -> list[list[int]]:
        """Rows of each choice in each of the own chunks."""
        return choice_sizes(self.by_choice, self.layout, self.rank, self.sends)

    def chunk(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token and choice of every row this rank packs for a chunk, int32."""
        parts = [self.order[start : start + length] for start, length in self.sends.runs[index]]
        route = parts[0] if len(parts) == 1 else torch.cat([self.order[:0], *parts])
        choice = torch.div(route, max(1, self.layer.num_tokens), rounding_mode="floor")
        return route - choice * self.layer.num_tokens, choice


def route(
    expert_ids: torch.Tensor, route_weights: torch.Tensor, tokens: torch.Tensor, form: ExpertForm,
    num_native: int, session: Session, learns: bool = True,
) -> Routes:  # fmt: skip
    """Counts, plan and tables. One all-gather of E + 3 integers, one copy to the host.

    `learns` says whether this rank's experts have gradients; the order of messages depends on what all ranks say.

    Raises: on all ranks alike, ShapeError for expert ids out of range or non-finite route weights anywhere,
    WorkingSetError for more tokens than declared; ConfigError where E is not a multiple of E_p.
    """
    num_ranks, rank = session.num_ranks, session.rank
    num_experts = num_native * num_ranks
    check_divides(num_experts, num_ranks)
    num_tokens, num_choices = expert_ids.shape
    by_choice = _count(expert_ids, num_experts)
    order = _order(expert_ids)
    everyone = collectives.all_gather(_report(by_choice, expert_ids, route_weights, learns), session.group)
    host = torch.cat([everyone.reshape(-1), by_choice.reshape(-1)]).cpu().numpy().astype(np.int64)
    reports = host[: everyone.numel()].reshape(num_ranks, -1)
    session.pool.counters["host_syncs"] += 1
    counts = np.ascontiguousarray(reports[:, :num_experts])
    _check(reports[:, num_experts:], num_experts)
    most = int(counts.sum(axis=1).max()) // max(1, num_choices)
    session.pool.check_tokens(most)
    layer = layer_shape(tokens, num_choices, num_experts, form, session, most)
    policy = session.policy
    plan = plan_experts(
        counts, max_load=policy.max_load, switch_ratio=policy.switch_ratio,
        min_rows=policy.min_rows, ranks_per_node=policy.ranks_per_node,
    )  # fmt: skip
    layout = lay_out(
        counts, plan, chunk_rows=chunk_tokens(policy, layer) * max(1, num_choices), spill_slots=policy.spill_slots
    )
    receives = receive_tables(layout, rank)
    session.telemetry.planned(counts, layout, rank)
    own = LayerShape(**{**vars(layer), "num_tokens": num_tokens})
    return Routes(
        own, layout, send_tables(layout, rank), receives, order, host[everyone.numel() :].reshape(-1, num_choices),
        rank, _native_left(layout, receives, rank), bool(reports[:, -1].any()),
    )  # fmt: skip


def layer_shape(
    tokens: torch.Tensor, num_choices: int, num_experts: int, form: ExpertForm, session: Session, most_tokens: int
) -> LayerShape:
    """The layer in integers, equal on all ranks: N is the declared one, else the most that any rank holds."""
    device = tokens.device
    return LayerShape(
        num_tokens=session.pool.max_tokens or most_tokens, num_choices=num_choices, num_experts=num_experts,
        num_ranks=session.num_ranks, hidden=form.hidden, width=form.width,
        row_bytes=tokens.element_size(), weight_bytes=tokens.element_size(), expert_elements=form.elements(),
        overlap=session.num_ranks == 1 and session.pool.overlaps(device),
        tile_elements=TILE_ELEMENTS["cpu" if device.type == "cpu" else "accelerator"],
    )  # fmt: skip


def fingerprint(expert_ids: torch.Tensor) -> torch.Tensor:
    """A number that changes when any id does (a 0-d int64 tensor on the ids' device; no host sync)."""
    place = torch.arange(expert_ids.numel(), device=expert_ids.device).mul_(2_654_435_761).remainder_(2**31 - 1)
    return place.mul_(expert_ids.reshape(-1) + 1).sum()


def _count(expert_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E, k] int32: routes of each (expert, choice); ids out of range are clamped here and refused in `_check`."""
    num_choices = expert_ids.shape[1]
    key = (
        expert_ids.clamp(0, num_experts - 1).mul_(num_choices).add_(torch.arange(num_choices, device=expert_ids.device))
    )
    counts = torch.zeros(num_experts * num_choices, dtype=torch.int32, device=expert_ids.device)
    one = torch.ones((), dtype=torch.int32, device=expert_ids.device)
    return counts.index_add_(0, key.reshape(-1), one.expand(key.numel())).view(num_experts, num_choices)


def _order(expert_ids: torch.Tensor) -> torch.Tensor:
    return torch.sort(expert_ids.to(torch.int32).t().reshape(-1), stable=True).indices.to(torch.int32)


def _report(
    by_choice: torch.Tensor, expert_ids: torch.Tensor, route_weights: torch.Tensor, learns: bool
) -> torch.Tensor:
    """[E + 3] int32: counts, ids out of range, route weights that are not finite, whether the experts learn."""
    outside = ((expert_ids < 0) | (expert_ids >= by_choice.shape[0])).sum(dtype=torch.int32)
    infinite = route_weights.isfinite().logical_not_().sum(dtype=torch.int32)
    learning = torch.full_like(outside, learns)
    return torch.cat([by_choice.sum(1, dtype=torch.int32), torch.stack([outside, infinite, learning])])


def _check(flags: Ints, num_experts: int) -> None:
    for column, what, allowed, remedy in (
        (0, "expert ids", f"0 .. {num_experts - 1}", "pass global ids; mask padding tokens by a zero route weight"),
        (1, "route weights that are not finite", "finite numbers", "look for NaN or overflow in the router's input"),
    ):
        if flags[:, column].any():
            wrong = ", ".join(f"{n} on rank {r}" for r, n in enumerate(flags[:, column].tolist()) if n)
            raise ShapeError(what, got=f"{wrong} bad ones", allowed=allowed, remedy=remedy)


def _native_left(layout: Layout, receives: Receives, rank: int) -> list[int]:
    """What each native's gradient waits for: chunks with own rows, and helpers."""
    plan = layout.plan
    left = [0] * plan.num_native
    for group, experts in zip(receives.group, receives.experts, strict=True):
        if group == 0:
            for place, _, _ in experts:
                left[place] += 1
    away = plan.expert[(plan.owner == rank) & (plan.dest != rank)]
    for expert in away.tolist():
        left[expert - rank * plan.num_native] += 1
    return left
