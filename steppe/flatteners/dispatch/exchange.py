"""PipelinedLLEP: dispatch -> experts -> combine, chunk by chunk, with nothing route-shaped kept between them.

Note [tap and exchange]
One autograd Function that saves its inputs still runs its forward twice under activation checkpointing: tensors are
packed when forward has returned. So there are two. `Tap` saves all inputs and returns a handle without storage; its
backward is the whole chunked backward. Then, without grad, the chunks run. `Exchange` joins handle and result and saves
nothing. In a recompute torch's checkpoint stops at Tap's save, the last of the block, before any collective: the
experts run forward once. The tables reach Tap's backward through the `Call` of the first forward, so they are replayed,
never derived again. A block that saves a tensor behind its experts (a norm, dropout) loses this and runs them twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from steppe.core.errors import ShapeError
from steppe.flatteners.dispatch.budget import DispatchPolicy
from steppe.flatteners.dispatch.experts import ChunkMath
from steppe.flatteners.dispatch.gradients import NativeSums
from steppe.flatteners.dispatch.paths import LanePath, LocalPath, Path, Source, WirePath
from steppe.flatteners.dispatch.routes import Routes, Session, fingerprint, route
from steppe.flatteners.dispatch.spill import ReturnTravel, Travel
from steppe.flatteners.dispatch.weights import TENSOR_NAMES, ExpertForm, ExpertStack, ExpertWeights
from steppe.flatteners.dispatch.workspace import Workspace, sum_dtype
from steppe.runtime import collectives, scopes


def pipelined_llep(
    tokens: torch.Tensor,
    expert_ids: torch.Tensor,
    route_weights: torch.Tensor,
    experts: ExpertWeights,
    *,
    group: collectives.Group = None,
    policy: DispatchPolicy | None = None,
    session: Session | None = None,
) -> torch.Tensor:
    """Weighted expert outputs [N,H] of `tokens` [N,H] under `expert_ids` [N,k] (global) and `route_weights` [N,k].

    `experts` are this rank's M natives; ranks may hold different N, or none. `session` shares buffers and telemetry
    between calls (then `group` and `policy` are the session's).

    Peak: budget.cost(layer, policy).peak_bytes beyond the inputs, whatever the routing.
    Exactness: reordered over the chunks' sums; two runs give the same bits.
    Raises: ShapeError for tensors that don't fit, ids out of range, non-finite weights; ConfigError where E_p does not
        divide E; WorkingSetError for more tokens than declared; CollectiveTimeout naming layer, chunk and peers.
    Source: arXiv 2609.14306 for the schedule; docs/dispatch.md for what differs.
    """
    _check_inputs(tokens, expert_ids, route_weights, experts)
    session = session or Session(policy or DispatchPolicy(), group)
    call = Call(session, experts.form(), experts.num_experts)
    session.telemetry.begin(torch.is_grad_enabled())
    with torch.autocast(tokens.device.type, enabled=False):
        handle = Tap.apply(call, tokens, route_weights, expert_ids, *experts.tensors)
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in experts.tensors)
        with torch.no_grad(), scopes.label("dispatch"):
            out = call.forward(learns, tokens, expert_ids, route_weights, experts.form().stack(*experts.tensors))
        return Exchange.apply(handle, [out])  # type: ignore[no-any-return]


class PipelinedLLEP(torch.nn.Module):
    """`pipelined_llep` over expert weights that are given once; see there.

    The tensors of `experts` that are Parameters become this module's.
    """

    def __init__(
        self,
        experts: ExpertWeights,
        *,
        group: collectives.Group = None,
        policy: DispatchPolicy | None = None,
        session: Session | None = None,
    ) -> None:
        super().__init__()
        self.session = session or Session(policy or DispatchPolicy(), group)
        self._reading = {name: getattr(experts, name) for name in ("transposed", "interleaved", "activation")}
        for name in TENSOR_NAMES:
            setattr(self, name, getattr(experts, name))

    def forward(self, tokens: torch.Tensor, expert_ids: torch.Tensor, route_weights: torch.Tensor) -> torch.Tensor:
        tensors = {name: getattr(self, name) for name in TENSOR_NAMES}
        return pipelined_llep(
            tokens, expert_ids, route_weights, ExpertWeights(**tensors, **self._reading), session=self.session
        )


class Call:
    """One forward, and the backward that replays it."""

    def __init__(self, session: Session, form: ExpertForm, num_native: int) -> None:
        self.session, self.form, self.num_native = session, form, num_native
        self.routes: Routes
        self.seen: torch.Tensor

    def forward(
        self, learns: bool, tokens: torch.Tensor, expert_ids: torch.Tensor, route_weights: torch.Tensor,
        natives: ExpertStack,
    ) -> torch.Tensor:  # fmt: skip
        """Tables, then the chunks. `learns`: this rank's experts have gradients."""
        self.seen = fingerprint(expert_ids)
        self.routes = route(expert_ids, route_weights, tokens, self.form, self.num_native, self.session, learns)
        routes = self.routes
        numbers = sum_dtype(tokens.dtype)
        combine = numbers if self.session.policy.combine_dtype == "float32" else tokens.dtype
        source = Source(
            routes, tokens.detach(), route_weights.detach().to(numbers).reshape(-1),
            torch.zeros(tokens.shape, dtype=combine, device=tokens.device),
        )  # fmt: skip
        what = f"{self.session.telemetry.layer}, forward"
        travel = Travel(routes, natives, self.session, what)
        self._run(source, travel, lambda math, stack, rows, group: math.forward(stack, rows), what)
        return source.total.to(tokens.dtype)

    def backward(
        self, grad: torch.Tensor, tokens: torch.Tensor, route_weights: torch.Tensor, natives: ExpertStack
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Gradients of tokens, route weights and expert tensors; the latter's are neither made nor
        sent where no rank's experts learn."""
        routes, numbers = self.routes, sum_dtype(tokens.dtype)
        source = Source(
            routes, tokens, route_weights.to(numbers).reshape(-1),
            torch.zeros(tokens.shape, dtype=numbers, device=tokens.device), grad,
            torch.zeros(route_weights.numel(), dtype=numbers, device=tokens.device),
        )  # fmt: skip
        what = f"{self.session.telemetry.layer}, backward"
        weights = self._backward_chunks(source, natives, what, numbers)
        assert source.weight_grads is not None
        weight_grads = source.weight_grads.view(route_weights.shape).to(route_weights.dtype)
        return source.total.to(tokens.dtype), weight_grads, weights

    def _backward_chunks(
        self, source: Source, natives: ExpertStack, what: str, numbers: torch.dtype
    ) -> tuple[torch.Tensor | None, ...]:
        """The chunks, and the expert tensors' gradients."""
        routes = self.routes
        if not routes.learns:
            travel = Travel(routes, natives, self.session, what)
            self._run(source, travel, lambda math, stack, rows, group: math.backward(stack, rows, None), what)
            return (None,) * len(natives.tensors)
        sums = NativeSums.zeros(self.form, list(routes.native_left), natives.gate_up, numbers)
        home = ReturnTravel(routes, natives, self.session, what, sums)
        self._run(source, home, lambda math, stack, rows, group: math.backward(stack, rows, home.sums(group)), what)
        counters = self.session.pool.counters
        counters["most_sums_held"] = max(counters["most_sums_held"], sums.most_held)
        return sums.grads.tensors

    def _run(self, source: Source, travel: Travel, compute: Callable[..., None], what: str) -> None:
        session, routes = self.session, self.routes
        with session.pool.lend(routes.layer, routes.layout.row_bound, source.tokens) as workspace:
            math = ChunkMath(workspace, routes.layer.tile_elements)
            path = _path(source, workspace, session, what)
            with session.telemetry.passes.span(source.tokens.device):
                run_chunks(path, travel, routes, lambda stack, rows, group: compute(math, stack, rows, group))
        session.pool.counters["flops"] += math.flops


def run_chunks(path: Path, travel: Travel, routes: Routes, compute: Callable[..., None]) -> None:
    """The pipeline. Every rank runs every chunk, with rows or without."""
    chunks = routes.layout.chunks
    path.start(0)
    for chunk in range(chunks):
        travel.before(chunk)
        rows = path.take(chunk)
        if path.ahead and chunk + 1 < chunks:
            path.start(chunk + 1)
        group = routes.receives.group[chunk]
        compute(travel.stack(group), rows, group)
        path.give(chunk)
        travel.after(chunk)
        if not path.ahead and chunk + 1 < chunks:
            path.start(chunk + 1)
    path.finish()
    travel.finish()


def _path(source: Source, workspace: Workspace, session: Session, what: str) -> Path:
    if session.num_ranks > 1:
        return WirePath(source, workspace, session, what)
    if source.routes.layer.overlap:
        return LanePath(source, workspace, session.pool.lane(source.tokens.device))
    return LocalPath(source, workspace)


class Tap(torch.autograd.Function):
    """Saves all inputs, does the backward; see Note [tap and exchange]."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, tokens: torch.Tensor, route_weights: torch.Tensor, expert_ids: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.call = call
        ctx.save_for_backward(tokens, route_weights, expert_ids, *weights)
        return tokens.new_empty(()).expand(tokens.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        call: Call = ctx.call
        tokens, route_weights, expert_ids, *weights = ctx.saved_tensors
        need_tokens, need_routes, _, *need_weights = ctx.needs_input_grad[1:]
        with scopes.label("dispatch"):
            call.session.telemetry.replayed(fingerprint(expert_ids) != call.seen)
            natives = call.form.stack(*weights)
            d_tokens, d_routes, d_weights = call.backward(grad, tokens, route_weights, natives)
        given = (d if need else None for d, need in zip(d_weights, need_weights, strict=True))
        return None, d_tokens if need_tokens else None, d_routes if need_routes else None, None, *given


class Exchange(torch.autograd.Function):
    """Joins Tap's handle and the result; saves nothing.

    The result comes boxed: an input that is returned would be a view, and FSDP2 warns of writing to those.
    """

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        return box.pop()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _check_inputs(
    tokens: torch.Tensor, expert_ids: torch.Tensor, route_weights: torch.Tensor, experts: ExpertWeights
) -> None:
    form = experts.form()
    if tokens.dim() != 2 or tokens.shape[1] != form.hidden:
        raise ShapeError(
            "tokens", got=tuple(tokens.shape), allowed=f"[N, {form.hidden}]", remedy="flatten batch and sequence"
        )
    if tokens.dtype != experts.gate_up.dtype or not tokens.is_floating_point():
        raise ShapeError(
            "dtypes", got=f"tokens {tokens.dtype}, experts {experts.gate_up.dtype}", allowed="one floating dtype",
            remedy="cast both (FSDP2: MixedPrecisionPolicy), rows stay in it",
        )  # fmt: skip
    pairs = expert_ids.dim() == 2 and len(expert_ids) == len(tokens) and expert_ids.shape[1] > 0
    if not pairs or route_weights.shape != expert_ids.shape:
        raise ShapeError(
            "routes", got=f"ids {tuple(expert_ids.shape)}, weights {tuple(route_weights.shape)}",
            allowed=f"[{len(tokens)}, k] both, k from 1", remedy="pass top-k ids and weights of these tokens",
        )  # fmt: skip
    if expert_ids.dtype not in (torch.int64, torch.int32) or not route_weights.is_floating_point():
        raise ShapeError(
            "routes", got=f"ids {expert_ids.dtype}, weights {route_weights.dtype}",
            allowed="int64 or int32 ids, floating weights", remedy="check their order, or cast the ids: .long()",
        )  # fmt: skip
