"""The name `pipelined_llep` in transformers' registries: experts on one rank, and expert parallelism.

    register(DispatchPolicy(micro_chunks=16))
    AutoModelForCausalLM.from_pretrained(path, experts_implementation="pipelined_llep")               # one rank
    DistributedConfig(fsdp_size=4, ep_size=2, ep_implementation="pipelined_llep")                      # several

Shared experts are not moved forward by a registry; `attach` does it. Without it they cost a second expert forward
under activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from steppe.core.errors import ConfigError
from steppe.flatteners.dispatch import recognise
from steppe.flatteners.dispatch.budget import DispatchPolicy
from steppe.flatteners.dispatch.exchange import pipelined_llep
from steppe.flatteners.dispatch.routes import Session
from steppe.flatteners.dispatch.telemetry import Telemetry
from steppe.flatteners.dispatch.weights import ExpertWeights
from steppe.flatteners.dispatch.workspace import WorkspacePool

NAME = "pipelined_llep"
Reader = Callable[[Callable[[Any], torch.Tensor]], ExpertWeights]


def register(
    policy: DispatchPolicy | None = None, *, name: str = NAME, pool: WorkspacePool | None = None
) -> WorkspacePool:
    """Register under `name`; all layers that use it share the policy and one pool of workspaces, which is returned."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    policy, pool = policy or DispatchPolicy(), pool or WorkspacePool()
    readers: dict[int, tuple[Any, Reader, Session]] = {}

    def experts_forward(
        module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if id(module) not in readers:
            readers[id(module)] = module, recognise.reader(module), Session(policy, pool=pool)
        _, read, session = readers[id(module)]
        return pipelined_llep(hidden_states, top_k_index, top_k_weights, read(_as_it_is), session=session)

    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    if find_spec("transformers.distributed.expert_parallel") is not None:  # transformers 5.23 and later
        _register_expert_parallel(name, policy, pool)
    return pool


def _register_expert_parallel(name: str, policy: DispatchPolicy, pool: WorkspacePool) -> None:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

    class PipelinedEP(EPImplementation):  # type: ignore[misc]
        """The expert group's tokens through PipelinedLLEP; weights are the module's local parts."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            if tp_mesh.size() > 1:
                raise ConfigError(
                    "DistributedConfig.tp_size", got=tp_mesh.size(), allowed=1,
                    remedy="ranks of a tensor-parallel group hold the same tokens; use fsdp_size and ep_size",
                )  # fmt: skip
            group = ep_mesh.get_group() if ep_mesh.size() > 1 else None
            self.session = Session(policy, group, pool=pool, telemetry=Telemetry())
            self.read = recognise.reader(experts)

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            experts = self.read(_as_it_is)
            return pipelined_llep(rows, top_k_index, top_k_weights, experts, session=self.session).view_as(
                hidden_states
            )

    EPImplementationInterface.register(name, PipelinedEP)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
