"""Joining a live model: build the optimizer, name what would undo its work, and read its failure signals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.parallel import DistributedDataParallel

from steppe.core.errors import ConflictError
from steppe.core.policy import Conflict
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.budget import OptimizerPolicy
from steppe.flatteners.optimizer.crew import numa_nodes
from steppe.flatteners.optimizer.engine import Wiring
from steppe.runtime.link import HostLink

AFTER_SHARDING: Final = True  # the state follows the parameters as FSDP2 leaves them
USES_LINK: Final = True
HOST_BOUND = 0.8  # share of a step spent in the host arithmetic from which on it is the slowest stage


class Attached:
    """An optimizer on a live model; `detach` removes its hooks and ends its threads."""

    def __init__(self, optimizer: OffloadStreamAdamW) -> None:
        self.optimizer = optimizer

    def detach(self) -> None:
        self.optimizer.close()

    def stats(self) -> dict[str, Any]:
        return self.optimizer.stats()


def attach(
    model: torch.nn.Module, policy: OptimizerPolicy, mesh: object = None, *,
    groups: Iterable[Mapping[str, Any]] | None = None, wiring: Wiring | None = None, share: tuple[int, int] = (0, 1),
    link: HostLink | None = None, **settings: Any,
) -> Attached:  # fmt: skip
    """Build the optimizer of a model that is already sharded, and allocate its state at once.

    `groups` are parameter groups, by default all parameters in one; `share` is this process's (local rank, local ranks)
    of the node's CPUs; `link` is the host link that it shares with others, whose urgent copies go first; `settings` are
    lr, betas, eps, weight_decay and maximize. The mesh is read off the parameters themselves.
    Raises: ConflictError for the first of `conflicts(model)`; HostMemoryError before anything is allocated.
    """
    optimizer = OffloadStreamAdamW(
        [dict(group) for group in groups] if groups is not None else model.parameters(),
        bucket_bytes=policy.bucket_bytes, slots=policy.slots, update=policy.update, max_norm=policy.max_norm,
        overlap_backward=policy.overlap_backward, threads=policy.threads, streams=policy.streams, numa=policy.numa,
        wiring=wiring or Wiring(share=share, link=link), **settings,
    )  # fmt: skip
    for conflict in conflicts(model, optimizer):
        raise ConflictError("OffloadStreamAdamW", got=conflict.what, allowed="no such pair", remedy=conflict.remedy)
    optimizer.materialize()
    return Attached(optimizer)


def conflicts(*live: object) -> tuple[Conflict, ...]:
    """What among these models, optimizers, trainers, scalers or engines would undo the optimizer's work."""
    found: list[Conflict] = []
    overlapped = any(isinstance(o, OffloadStreamAdamW) and o.policy.overlap_backward for o in _optimizers(live))
    for thing in live:
        found += _sharding_conflicts(thing)
        if overlapped:
            found += _overlap_conflicts(thing)
    found += _shared_parameters(list(_optimizers(live)))
    return tuple(dict.fromkeys(found))


def _optimizers(live: Iterable[object]) -> Iterator[torch.optim.Optimizer]:
    """Optimizers among the objects, those that a trainer or an accelerate wrapper holds included; each once."""
    seen: set[int] = set()
    for thing in live:
        held = thing if isinstance(thing, torch.optim.Optimizer) else getattr(thing, "optimizer", None)
        held = getattr(held, "optimizer", held)
        if isinstance(held, torch.optim.Optimizer) and id(held) not in seen:
            seen.add(id(held))
            yield held


def _sharding_conflicts(thing: object) -> Iterator[Conflict]:
    for module in thing.modules() if isinstance(thing, torch.nn.Module) else ():
        if isinstance(module, FSDPModule) and _offloads(module):
            yield Conflict("FSDP2 keeps the parameters on the host (CPUOffloadPolicy), where it updates them itself",
                           "shard with fully_shard(..., offload_policy=OffloadPolicy())")  # fmt: skip
    stage = _zero_stage(thing)
    if stage:
        yield Conflict(f"a DeepSpeed engine with ZeRO-{stage} owns parameters and optimizer",
                       "use fully_shard with OffloadStreamAdamW, or DeepSpeed's own offload without it")  # fmt: skip


def _offloads(module: FSDPModule) -> bool:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.13 has one, not a list
    groups = [state._fsdp_param_group] if groups is None else groups
    return any(group is not None and isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)


def _zero_stage(thing: object) -> int:
    """The ZeRO stage of a DeepSpeed engine, or of the plugin in a trainer's arguments."""
    stage = getattr(thing, "zero_optimization_stage", None)
    if callable(stage):
        return int(stage())
    plugin = getattr(getattr(thing, "args", thing), "deepspeed_plugin", None)
    return int(getattr(plugin, "zero_stage", 0) or 0)


def _overlap_conflicts(thing: object) -> Iterator[Conflict]:
    norm = getattr(getattr(thing, "args", thing), "max_grad_norm", None)
    if isinstance(norm, (int, float)) and norm > 0:
        yield Conflict(f"the trainer clips after backward (max_grad_norm={norm:g}); the gradients have left by then",
                       f"max_grad_norm=0 there, and OffloadStreamAdamW(..., max_norm={norm:g})")  # fmt: skip
    if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled():
        yield Conflict("a GradScaler unscales gradients after backward, but they have left by then",
                       "train in bfloat16 without a scaler, or overlap_backward=False")  # fmt: skip
    for module in thing.modules() if isinstance(thing, torch.nn.Module) else ():
        if isinstance(module, DistributedDataParallel):
            yield Conflict("DistributedDataParallel reduces gradients after they were accumulated; they leave before",
                           "shard with fully_shard, or overlap_backward=False")  # fmt: skip


def _shared_parameters(optimizers: list[torch.optim.Optimizer]) -> Iterator[Conflict]:
    owners: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            other = owners.setdefault(id(parameter), optimizer)
            if other is not optimizer and any(isinstance(o, OffloadStreamAdamW) for o in (other, optimizer)):
                yield Conflict("two optimizers update the same parameters", "give each parameter to one of them")
                return


def diagnose(stats: Mapping[str, Any]) -> tuple[str, ...]:
    """What a user should know of a run's figures, in words with numbers; empty when all is well."""
    told: list[str] = []
    kernel = str(stats.get("kernel", ""))
    step_s, host_s = stats.get("step_seconds", 0.0), stats.get("update_seconds", 0.0)
    if kernel.startswith("numpy"):
        told.append(f"the host arithmetic runs in {kernel}: with a C compiler there, reinstall steppe to build it")
    if stats.get("device", "cpu") != "cpu" and step_s and host_s / step_s >= HOST_BOUND:
        rate = stats["num_elements"] / host_s / 1e6
        told.append(f"AdamW on the host is the slowest stage: {host_s:.3f} of {step_s:.3f} s, {rate:.0f} M "
                    f"parameters/s on {stats['threads']} threads")  # fmt: skip
    if stats.get("skipped"):
        told.append(f"{stats['skipped']} of {stats['skipped'] + stats['steps']} steps were skipped: non-finite norm")
    if stats.get("streams") == 1 and len(_nodes_of(stats.get("cpus", ()))) > 1:
        told.append("one stream of updates spans several NUMA nodes: its state crosses sockets; set streams")
    return tuple(told)


def _nodes_of(cpus: Iterable[int]) -> set[int]:
    wanted = set(cpus)
    return {number for number, node in enumerate(numa_nodes()) if wanted & set(node)}
