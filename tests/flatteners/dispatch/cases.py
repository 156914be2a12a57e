"""Cases of expert dispatch: expert stacks of the families' forms, routings, and one call with all its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from steppe.flatteners.dispatch.budget import DispatchPolicy
from steppe.flatteners.dispatch.exchange import pipelined_llep
from steppe.flatteners.dispatch.gates import clamped_swiglu
from steppe.flatteners.dispatch.profiles import PROFILES, forced_routes
from steppe.flatteners.dispatch.reference import dense_loop, plain_experts
from steppe.flatteners.dispatch.routes import Session
from steppe.flatteners.dispatch.weights import ExpertWeights
from steppe.flatteners.dispatch.workspace import WorkspacePool
from tests.support.exactness import assert_reordered

FORMS = ("gated", "gpt_oss")
ROUTINGS = ("random", "balanced", "95/4", "95/1", "all_to_one", "same_twice", "zero_weights")
GPT_OSS = clamped_swiglu()


@dataclass(frozen=True)
class Case:
    """One layer on all ranks: `tokens[r]` of rank r."""

    form: str = "gated"
    routing: str = "random"
    dtype: torch.dtype = torch.float64
    tokens: tuple[int, ...] = (40,)
    experts: int = 8
    choices: int = 3
    hidden: int = 16
    width: int = 8
    chunk_tokens: int = 7
    spill_slots: int = 2
    min_rows: int = 0
    max_load: float = 1.1
    switch_ratio: float = 1.3
    weights_dtype: torch.dtype | None = None  # of the route weights

    @property
    def policy(self) -> DispatchPolicy:
        return DispatchPolicy(
            chunk_tokens=self.chunk_tokens, spill_slots=self.spill_slots, min_rows=self.min_rows,
            max_load=self.max_load, switch_ratio=self.switch_ratio,
        )  # fmt: skip

    @property
    def longest_sum(self) -> int:
        """Terms of the longest sum of any result: rows of an expert's gradient, columns of a product."""
        return max(sum(self.tokens) * self.choices, 2 * self.width, self.hidden, 1)


@dataclass(frozen=True)
class Inputs:
    tokens: torch.Tensor
    expert_ids: torch.Tensor
    route_weights: torch.Tensor
    upstream: torch.Tensor


def make_experts(case: Case, dtype: torch.dtype | None = None) -> ExpertWeights:
    """All E experts, as functions of the seed, rounded to the case's dtype and held in `dtype`."""
    generator = torch.Generator().manual_seed(7)
    e, h, i = case.experts, case.hidden, case.width

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
        return values.to(case.dtype).to(dtype or case.dtype).requires_grad_()

    if case.form == "gpt_oss":
        tensors = draw(e, h, 2 * i), draw(e, i, h), draw(e, 2 * i), draw(e, h)
        return ExpertWeights(*tensors, transposed=True, interleaved=True, activation=GPT_OSS)
    if case.form == "biased":
        return ExpertWeights(draw(e, 2 * i, h), draw(e, h, i), draw(e, 2 * i), None, activation="gelu")
    return ExpertWeights(draw(e, 2 * i, h), draw(e, h, i))


def make_inputs(case: Case, rank: int, dtype: torch.dtype | None = None) -> Inputs:
    """Rank `rank`'s tokens, routes and upstream gradient; values rounded to the case's dtype, held in `dtype`."""
    generator = torch.Generator().manual_seed(100 + rank)
    n, k = case.tokens[rank], case.choices
    ids = expert_ids(case, rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    x, upstream = draw(n, case.hidden), draw(n, case.hidden)
    weights = torch.rand((n, k), generator=generator, dtype=torch.float64).to(case.weights_dtype or case.dtype)
    if case.routing == "zero_weights":
        weights[::2] = 0
    held = dtype or case.dtype
    kept = dtype or weights.dtype
    return Inputs(x.to(held).requires_grad_(), ids, weights.to(kept).requires_grad_(), upstream.to(held))


def expert_ids(case: Case, rank: int) -> torch.Tensor:
    n, k, e = case.tokens[rank], case.choices, case.experts
    if case.routing in (*PROFILES, "95/2", "95/4"):
        return torch.from_numpy(forced_routes(case.routing, num_tokens=n, num_experts=e, num_choices=k))
    rng = np.random.default_rng(31 + rank)
    if case.routing == "all_to_one":
        return torch.full((n, k), e - 1)
    if case.routing == "same_twice":
        return torch.from_numpy(rng.integers(0, 2, (n, k)))
    if case.routing == "first_rank":  # equally hot experts, all on the first rank
        return torch.from_numpy(rng.integers(0, e // len(case.tokens), (n, k)))
    scores = rng.random((n, e))
    return torch.from_numpy(np.argsort(scores, axis=1)[:, :k].copy())


def gradients(program: Callable[..., torch.Tensor], experts: ExpertWeights, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Output and all gradients of one call, by name."""
    out = program(inputs.tokens, inputs.expert_ids, inputs.route_weights, experts)
    wanted = (inputs.tokens, inputs.route_weights, *experts.tensors)
    grads = torch.autograd.grad(out, wanted, inputs.upstream)
    names = ("tokens", "route_weights", *(f"experts.{i}" for i in range(len(experts.tensors))))
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def shard(experts: ExpertWeights, rank: int, ranks: int) -> ExpertWeights:
    """Rank `rank`'s natives as leaves of their own."""
    native = experts.num_experts // ranks
    parts = [t.detach()[rank * native : (rank + 1) * native].clone().requires_grad_() for t in experts.tensors]
    names = [n for n in ("gate_up", "down", "gate_up_bias", "down_bias") if getattr(experts, n) is not None]
    return replace(experts, **dict(zip(names, parts, strict=True)))


def new_session(case: Case, group: object = None, **pool: object) -> Session:
    return Session(case.policy, group, pool=WorkspacePool(**pool))


def flat(session: Session) -> Callable[..., torch.Tensor]:
    return lambda *args: pipelined_llep(*args, session=session)


def whole(
    case: Case, program: Callable[..., torch.Tensor], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Output and gradients of a one-process program over all ranks' tokens."""
    parts = [make_inputs(case, r, dtype) for r in range(len(case.tokens))]
    together = Inputs(*(torch.cat([getattr(p, n).detach() for p in parts]) for n in Inputs.__annotations__))
    together.tokens.requires_grad_()
    together.route_weights.requires_grad_()
    return gradients(program, make_experts(case, dtype), together)


def assert_like_dense(case: Case, results: list[dict[str, torch.Tensor]], what: str = "") -> None:
    """All ranks' outputs and gradients together are the dense loop's, in the reordered grade."""
    truth = whole(case, dense_loop, torch.float64)
    plain = truth if case.dtype == torch.float64 else whole(case, plain_experts)
    for name, expected in truth.items():
        ours = torch.cat([r[name] for r in results])
        assert_reordered(ours, plain[name], expected, length=case.longest_sum, what=f"{what} {case}: {name}")
