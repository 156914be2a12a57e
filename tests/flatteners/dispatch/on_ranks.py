"""What the tests of several ranks run on each rank: many cases a launch."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from steppe.core.errors import CollectiveTimeout, Refusal
from steppe.flatteners.dispatch import reference, registry
from steppe.flatteners.dispatch.attach import attach, attach_plain
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


def counted_collectives(rank: int, world_size: int, case: Case) -> dict[str, int]:
    """Calls of torch.distributed by kind in one forward and backward, and the number of chunks."""
    import torch.distributed as dist

    seen: dict[str, int] = {}
    plain = {name: getattr(dist, name) for name in dir(dist) if callable(getattr(dist, name))}
    kinds = ("all_gather", "all_reduce", "all_to_all", "barrier", "batch_isend_irecv", "broadcast", "reduce_scatter")
    counted = {name: kind for name in plain for kind in kinds if name.startswith(kind) or f"{kind}_" in name}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[counted[name]] = seen.get(counted[name], 0) + 1
            return plain[name](*args, **kwargs)

        return call

    session, group = new_session(case, collectives.world()), collectives
    gathered = group._gather_single
    for name in counted:
        setattr(dist, name, counting(name))
    group._gather_single = counting(gathered.__name__)
    try:
        gradients(flat(session), shard(make_experts(case), rank, world_size), make_inputs(case, rank))
    finally:
        for name in counted:
            setattr(dist, name, plain[name])
        group._gather_single = gathered
    return {**seen, "chunks": session.telemetry.read().chunks}


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
    """Cross-entropy of the next token of [B,S], summed over the batch and divided by the global number of labels."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum") / divisor


def sharded_model(family: str, world_size: int, expert_ranks: int, policy: DispatchPolicy | None) -> tuple[Any, Any]:
    """A float64 toy over ranks; see `over_ranks`."""
    return over_ranks(whole_model(Step(family)), world_size, expert_ranks, policy)


def over_ranks(model: Any, world_size: int, expert_ranks: int, policy: DispatchPolicy | None) -> tuple[Any, Any]:
    """Experts over `ep` and FSDP2 over `efsdp`, everything else FSDP2 over all ranks. No policy: the plain program."""
    mesh = init_device_mesh("cpu", (world_size // expert_ranks, expert_ranks), mesh_dim_names=("efsdp", "ep"))
    world = init_device_mesh("cpu", (world_size,))
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


@dataclass(frozen=True)
class Step:
    """A family's model, where its experts live, and the routings it takes a step under: "router" is its own choice,
    the others are profiles. `tied`: every expert has a twin of equal score, and 3 are chosen, which cuts through a
    pair and is more than the natives of 4 ranks. (transformers' attention takes no empty batch: ranks without tokens
    are met in test_ranks.)"""

    family: str
    expert_ranks: int = 1
    again: bool = False  # under activation checkpointing
    routings: tuple[str, ...] = ("router",)
    dtype: torch.dtype = torch.float64
    tied: bool = False


def whole_model(step: Step) -> Any:
    """The unsharded model, a function of family, dtype and ties."""
    config = toy_config(step.family, **({"num_experts_per_tok": 3} if step.tied else {}))
    if step.dtype == torch.float64:
        model = float64_model(config).train()
    else:
        model = toy_model(step.family, num_experts_per_tok=config.num_experts_per_tok).to(step.dtype).train()
        model.set_experts_implementation("eager")
    spread_routers(model)
    if step.tied:
        _make_twins(model)
    return model


def _make_twins(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name or name.endswith(("gate.weight", "router.weight", "router.bias")):
                parameter[1::2] = parameter[0::2]


def family_steps(rank: int, world_size: int, steps: list[Step]) -> list[dict[str, Any]]:
    """Full gradients of each step by routing (on rank 0), expert forwards and backwards of its MoE layers."""
    return [_family_step(rank, world_size, step) for step in steps]


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


def _family_step(rank: int, world_size: int, step: Step) -> dict[str, Any]:
    policy = DispatchPolicy(chunk_tokens=5)
    model, attached = over_ranks(whole_model(step), world_size, step.expert_ranks, policy)
    if step.again:
        checkpoint_blocks(model)
    gradients = {}
    divisor = sum(batch_of(r).numel() - 1 for r in range(world_size))
    for routing in step.routings:
        attached.forced = None if routing == "router" else routing
        model.zero_grad()
        summed_loss(model, batch_of(rank), divisor).backward()
        found = full_gradients(model)
        gradients[routing] = found if rank == 0 else {}
    stats = attached.stats()
    attached.detach()
    return {
        "gradients": gradients,
        "forwards": [layer.forwards for layer in stats["layers"]],
        "backwards": [layer.backwards for layer in stats["layers"]],
        "flipped": [layer.flipped for layer in stats["layers"]],
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
    return [
        tuple(_peak(shape, profile, program) for program in (_flat_once(policy), _plain_once)) for profile in profiles
    ]


def _flat_once(policy: DispatchPolicy) -> Callable[..., torch.Tensor]:
    return lambda *args: pipelined_llep(*args, session=Session(policy, collectives.world(), pool=WorkspacePool()))


def _plain_once(*args: Any) -> torch.Tensor:
    return reference.plain_expert_parallel(*args, collectives.world())


def _peak(shape: LayerShape, profile: str, program: Callable[..., torch.Tensor]) -> int:
    """A few tokens go first: buffers that libraries make once."""
    draw = lambda *size: (torch.randn(size) * 0.1).requires_grad_()  # noqa: E731
    experts = ExpertWeights(
        draw(shape.num_native, 2 * shape.width, shape.hidden), draw(shape.num_native, shape.hidden, shape.width)
    )
    measured = 0
    for num_tokens in (64, shape.num_tokens):
        size = {"num_tokens": num_tokens, "num_experts": shape.num_experts, "num_choices": shape.num_choices}
        ids = torch.from_numpy(forced_routes(profile, **size))
        tokens, weights = draw(num_tokens, shape.hidden), draw(*ids.shape)
        upstream = torch.randn(tokens.shape)
        found = allocator_peak(lambda: program(tokens, ids, weights, experts).backward(upstream))  # noqa: B023
        measured = found.peak_bytes - found.base_bytes
        for tensor in experts.tensors:
            tensor.grad = None
    return measured


def drifting(rank: int, world_size: int, steps: int) -> list[int]:
    """Bytes of step 1, the three quarters and the last step of a router that drifts from balanced to one expert; and
    the experts that travelled in the last one."""
    session = Session(DispatchPolicy(chunk_tokens=16), collectives.world(), pool=WorkspacePool(max_tokens=64))
    draw = lambda *size: (torch.randn(size) * 0.1).requires_grad_()  # noqa: E731
    experts = ExpertWeights(draw(4, 32, 32), draw(4, 32, 16))
    tokens, weights = draw(64, 32), torch.full((64, 4), 0.25).requires_grad_()

    def step(share: float) -> None:
        scores = torch.rand(64, 4 * world_size)
        scores[:, 1] += 2 * share
        if share > 0.8:  # at the end the same expert several times in a token
            scores[:, 2:] -= 2 * share
        ids = scores.topk(4).indices
        ids = torch.where(torch.rand(ids.shape) < share - 0.5, 1, ids)
        pipelined_llep(tokens, ids, weights, experts, session=session).square().mean().backward()
        for tensor in (tokens, weights, *experts.tensors):
            tensor.grad = None

    measured = []
    for index in range(steps):
        if index in (1, steps // 4, steps // 2, 3 * steps // 4, steps - 1):
            found = allocator_peak(lambda: step(index / steps))  # noqa: B023
            measured.append(found.peak_bytes - found.base_bytes)
        else:
            step(index / steps)
    return [*measured, session.telemetry.read().transfers]
