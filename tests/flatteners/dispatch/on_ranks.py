"""What the tests of several ranks run on each rank: many cases a launch."""

from __future__ import annotations

import random
import time
import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from steppe.core.errors import CollectiveTimeout, Refusal
from steppe.flatteners.dispatch import reference, registry
from steppe.flatteners.dispatch.attach import attach, attach_plain, diagnose
from steppe.flatteners.dispatch.budget import DispatchPolicy, LayerShape
from steppe.flatteners.dispatch.exchange import pipelined_llep
from steppe.flatteners.dispatch.plan import check_divides
from steppe.flatteners.dispatch.profiles import forced_routes
from steppe.flatteners.dispatch.router import auxiliary_loss
from steppe.flatteners.dispatch.routes import Session, route
from steppe.flatteners.dispatch.weights import ExpertWeights
from steppe.flatteners.dispatch.workspace import WorkspacePool
from steppe.integrations.transformers import checkpoint_blocks
from steppe.runtime import collectives
from steppe.runtime.allocator import allocator_peak
from tests.flatteners.dispatch.cases import Case, flat, gradients, make_experts, make_inputs, new_session, shard
from tests.support.float64 import float64_model, toy_config, toy_model


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


def batch_of(rank: int) -> torch.Tensor:
    """Token ids [1, S_r], another length on every rank."""
    return torch.randint(0, 256, (1, 9 + 5 * rank), generator=torch.Generator().manual_seed(rank))


def summed_loss(model: Any, ids: torch.Tensor, divisor: int) -> torch.Tensor:
    """Cross-entropy of the next token, summed over the batch and divided by the global number of tokens."""
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / divisor


def sharded_model(family: str, world_size: int, expert_ranks: int, policy: DispatchPolicy | None) -> tuple[Any, Any]:
    """A float64 toy, experts over `ep` and FSDP2 over `efsdp`, everything else FSDP2 over all ranks."""
    mesh = init_device_mesh("cpu", (world_size // expert_ranks, expert_ranks), mesh_dim_names=("efsdp", "ep"))
    world = init_device_mesh("cpu", (world_size,))
    model = float64_model(toy_config(family)).train()
    spread_routers(model)
    attached = attach_plain(model, mesh) if policy is None else attach(model, policy, mesh)
    if hasattr(attached, "shard_complement"):
        attached.shard_complement(mesh)
    for module in (*model.model.layers, model):
        wrapped = fully_shard(module, mesh=world)
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
    return model, attached


def spread_routers(model: Any) -> None:
    """Router weights that make some experts hot, the same on every rank."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
                parameter.copy_(values + torch.linspace(0, 1, len(values))[:, None])


def family_steps(rank: int, world_size: int, cases: list[tuple[str, int, bool]]) -> list[dict[str, Any]]:
    """Each (family, E_p, under checkpoint): full gradients of one step, expert forwards and MoE layers."""
    return [_family_step(rank, world_size, *case) for case in cases]


def plain_family_step(rank: int, world_size: int, family: str) -> dict[str, torch.Tensor]:
    """Full gradients of one step of plain expert parallelism."""
    model, _ = sharded_model(family, world_size, 2, None)
    divisor = sum(batch_of(r).numel() - 1 for r in range(world_size))
    summed_loss(model, batch_of(rank), divisor).backward()
    return full_gradients(model)


def full_gradients(model: Any) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DTensor's note on each gather of a strided shard
        return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def _family_step(rank: int, world_size: int, family: str, expert_ranks: int, again: bool) -> dict[str, Any]:
    model, attached = sharded_model(family, world_size, expert_ranks, DispatchPolicy(chunk_tokens=5))
    if again:
        checkpoint_blocks(model)
    divisor = sum(batch_of(r).numel() - 1 for r in range(world_size))
    loss = summed_loss(model, batch_of(rank), divisor)
    loss.backward()
    gradients = full_gradients(model)
    stats = attached.stats()
    return {
        "gradients": gradients if rank == 0 else {},
        "forwards": [layer.forwards for layer in stats["layers"]],
        "backwards": [layer.backwards for layer in stats["layers"]],
        "told": diagnose(stats),
    }


def registered_ep(rank: int, world_size: int) -> torch.Tensor:
    """Gradient of this rank's experts of the first block, through transformers' expert parallelism."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    registry.register(DispatchPolicy(chunk_tokens=5))
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("ep", "tp"))
    model = toy_model("qwen3_moe").train()
    plan = {}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        plan |= {f"{experts}.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
        plan[experts] = "ep_dispatch_experts"
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation="pipelined_llep")
    summed_loss(model, batch_of(rank), 20).backward()
    gradient = model.model.layers[0].mlp.experts.gate_up_proj.grad
    assert isinstance(gradient, DTensor)
    return gradient.to_local().clone()


def router_logits(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn((10 + 22 * rank, 8), generator=generator) * 3 for _ in range(2)]


def auxiliary_shares(rank: int, world_size: int) -> torch.Tensor:
    return auxiliary_loss(router_logits(rank), 2, group=collectives.world())


def auxiliary_steps(rank: int, world_size: int, cases: list[tuple[str, int, bool]]) -> list[dict[str, Any]]:
    """Each (family, E_p, flattened): this rank's auxiliary loss, and full gradients of cross-entropy and it."""
    return [_auxiliary_step(rank, world_size, *case) for case in cases]


def _auxiliary_step(rank: int, world_size: int, family: str, expert_ranks: int, flattened: bool) -> dict[str, Any]:
    policy = DispatchPolicy(chunk_tokens=5) if flattened else None
    model, attached = sharded_model(family, world_size, expert_ranks, policy)
    batches = [batch_of(r) for r in range(world_size)]
    out = model(input_ids=batches[rank], use_cache=False, output_router_logits=True)
    share = batches[rank].numel() / sum(batch.numel() for batch in batches)
    (cross_entropy_of(out.logits[0], batches[rank][0], batches) + AUXILIARY * share * out.aux_loss).backward()
    gradients = full_gradients(model)
    attached.detach()
    return {"gradients": gradients if rank == 0 else {}, "auxiliary": share * out.aux_loss.detach()}


AUXILIARY = 0.5  # the coefficient: large, so that its gradient counts


def cross_entropy_of(logits: torch.Tensor, ids: torch.Tensor, batches: list[torch.Tensor]) -> torch.Tensor:
    """Of the next token [S,V], summed and divided by the number of labels in all batches."""
    divisor = sum(batch.numel() - 1 for batch in batches)
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum") / divisor


def peaks(rank: int, world_size: int, shape: LayerShape, profiles: list[str], policy: DispatchPolicy) -> list[Any]:
    """(flat, plain) bytes above the inputs of a forward and backward on this rank, for each profile."""
    return [_peaks(rank, world_size, shape, profile, policy) for profile in profiles]


def _peaks(rank: int, world_size: int, shape: LayerShape, profile: str, policy: DispatchPolicy) -> tuple[int, int]:
    group = collectives.world()
    draw = lambda *size: (torch.randn(size) * 0.1).requires_grad_()  # noqa: E731
    experts = ExpertWeights(
        draw(shape.num_native, 2 * shape.width, shape.hidden), draw(shape.num_native, shape.hidden, shape.width)
    )
    ids = torch.from_numpy(
        forced_routes(
            profile, num_tokens=shape.num_tokens, num_experts=shape.num_experts, num_choices=shape.num_choices
        )
    )
    tokens, weights = draw(shape.num_tokens, shape.hidden), draw(*ids.shape)
    upstream = torch.randn(tokens.shape)

    def step(program: Any) -> int:
        def run() -> None:
            program(tokens, ids, weights, experts).backward(upstream)

        def clear() -> None:
            for tensor in (tokens, weights, *experts.tensors):
                tensor.grad = None

        run()
        clear()
        found = allocator_peak(run)
        clear()
        return found.peak_bytes - found.base_bytes

    def flat_once(*args: Any) -> torch.Tensor:
        session = Session(policy, group, pool=WorkspacePool())
        return pipelined_llep(*args, session=session)

    return step(flat_once), step(lambda *args: reference.plain_expert_parallel(*args, group))
