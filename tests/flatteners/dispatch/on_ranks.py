"""What the tests of several ranks run on each rank: many cases a launch."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from steppe.core.errors import CollectiveTimeout, Refusal
from steppe.flatteners.dispatch import reference
from steppe.flatteners.dispatch.plan import check_divides
from steppe.flatteners.dispatch.routes import route
from steppe.runtime import collectives
from tests.flatteners.dispatch.cases import Case, flat, gradients, make_experts, make_inputs, new_session, shard


def run_cases(rank: int, world_size: int, cases: list[tuple[Case, bool]], hazards: bool) -> list[dict[str, Any]]:
    """Each (case, under checkpoint): output, gradients and counters of PipelinedLLEP on this rank."""
    return [one_case(rank, world_size, case, again, hazards) for case, again in cases]


def one_case(rank: int, world_size: int, case: Case, again: bool, hazards: bool) -> dict[str, Any]:
    dice = random.Random(rank)
    pool = {"poison": True, "delay": lambda: dice.random() * 2e-3} if hazards else {}
    session = new_session(case, collectives.world(), timeout_s=50.0, **pool)
    run = flat(session)
    program = (lambda *args: checkpoint(run, *args, use_reentrant=False)) if again else run
    experts = shard(make_experts(case), rank, world_size)
    results = gradients(program, experts, make_inputs(case, rank))
    stats = session.telemetry.read()
    results["counters"] = dict(session.pool.counters)
    results["stats"] = vars(stats)
    return results


def run_baselines(rank: int, world_size: int, case: Case) -> dict[str, dict[str, torch.Tensor]]:
    """The baselines over ranks, by name."""
    group = collectives.world()
    results = {}
    for name in ("plain_expert_parallel", "whole_batch_llep"):
        program = getattr(reference, name)
        experts = shard(make_experts(case), rank, world_size)
        results[name] = gradients(lambda *args, p=program: p(*args, group), experts, make_inputs(case, rank))
    return results


def refused(rank: int, world_size: int, kind: str) -> str:
    """What this rank is told when rank 1 (or the shape) is bad."""
    case = Case(tokens=(20, 40))
    session = new_session(case, collectives.world(), max_tokens=39 if kind == "tokens" else None)
    inputs, experts = make_inputs(case, rank), shard(make_experts(case), rank, world_size)
    if kind == "ids" and rank == 1:
        inputs.expert_ids[7, 1] = 8
    if kind == "weights" and rank == 1:
        inputs.route_weights.detach()[5] = float("inf")
    try:
        if kind == "experts":
            check_divides(15, world_size)
        flat(session)(inputs.tokens, inputs.expert_ids, inputs.route_weights, experts)
    except Refusal as told:
        return str(told)
    return "not refused"


def late_rank(rank: int, world_size: int) -> str:
    """Rank 1 stays away after the counts; rank 0 says what it waited for."""
    case = Case(tokens=(20, 20))
    session = new_session(case, collectives.world(), timeout_s=1.0)
    session.telemetry.layer = "blocks.3.experts"
    inputs, experts = make_inputs(case, rank), shard(make_experts(case), rank, world_size)
    if rank == 1:
        route(inputs.expert_ids, inputs.route_weights, inputs.tokens, experts.form(), experts.num_experts, session)
        time.sleep(2.0)
        return ""
    try:
        flat(session)(inputs.tokens, inputs.expert_ids, inputs.route_weights, experts)
    except CollectiveTimeout as late:
        return str(late)
    return "no time-out"
