"""What the tests of several ranks run on each rank: many cases a launch."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from steppe.flatteners.dispatch import reference
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
