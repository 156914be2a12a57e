"""Which modules of a live model are experts, how their weights are to be read, and which blocks hold shared experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from steppe.core.errors import ConfigError
from steppe.flatteners.dispatch.gates import clamped_swiglu
from steppe.flatteners.dispatch.weights import ExpertWeights

_TENSORS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
_SILU = ("SiLU", "SiLUActivation")


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with stacked `gate_up_proj` and `down_proj`, by name, in the model's order.

    Raises: ConfigError if there are none, or for experts that can't be run: without a gate, or with a norm behind.
    """
    found = {name: module for name, module in model.named_modules() if _is_stacked(module)}
    if not found:
        raise ConfigError(
            "experts", got=f"{type(model).__name__} without stacked experts",
            allowed="modules with 3-D parameters gate_up_proj and down_proj (transformers 5.23 and later)",
            remedy="stack the experts, or call steppe.pipelined_llep with ExpertWeights",
        )  # fmt: skip
    for name, module in found.items():
        odd = [
            flag
            for flag, wrong in (("has_gate", False), ("has_post_expert_norm", True))
            if getattr(module, flag, not wrong) == wrong
        ]
        if odd:
            raise ConfigError(
                f"experts {name}", got=f"{odd[0]} = {getattr(module, odd[0])}", allowed="gated experts, no norm behind",
                remedy="leave the dispatch flattener off for this model",
            )  # fmt: skip
    return found


def _is_stacked(module: nn.Module) -> bool:
    tensors = [getattr(module, name, None) for name in _TENSORS[:2]]
    return all(isinstance(t, torch.Tensor) and t.dim() == 3 for t in tensors)


def reader(module: nn.Module) -> Callable[[Callable[[Any], torch.Tensor]], ExpertWeights]:
    """`read(local)`: the module's weights now, each through `local` (a DTensor's own part), in their form."""
    activation = _activation(module)
    names = [name for name in _TENSORS if isinstance(getattr(module, name, None), torch.Tensor)]
    keywords = dict(zip(_TENSORS, ("gate_up", "down", "gate_up_bias", "down_bias")))
    flags = {
        "transposed": getattr(module, "is_transposed", False),
        "interleaved": not getattr(module, "is_concatenated", True),
    }

    def read(local: Callable[[Any], torch.Tensor]) -> ExpertWeights:
        tensors = {keywords[name]: local(getattr(module, name)) for name in names}
        return ExpertWeights(**tensors, **flags, activation=activation)

    return read


def _activation(module: nn.Module) -> Any:
    """The name or function of the gate. A gate of the class's own runs through the module's `_apply_gate`."""
    if hasattr(module, "alpha") and hasattr(module, "limit"):  # gpt-oss
        return clamped_swiglu(module.alpha, module.limit)
    own = getattr(type(module), "_apply_gate", None)
    if own is not None and own.__name__ != "_default_apply_gate":
        return _own_gate(module)
    act = module.act_fn
    if type(act).__name__ in _SILU:
        return "silu"
    return lambda gate, up: act(gate) * up


def _own_gate(module: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    interleaved = not getattr(module, "is_concatenated", True)

    def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        both = torch.stack((gate, up), -1).flatten(-2) if interleaved else torch.cat((gate, up), -1)
        out: torch.Tensor = module._apply_gate(both)
        return out

    return gate


def blocks_of(model: nn.Module, experts: dict[str, nn.Module]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """(MoE block, its experts): the module that holds the experts, next to the router and a shared expert."""
    modules = dict(model.named_modules())
    for name, module in experts.items():
        yield modules[name.rpartition(".")[0]], module


def shared_expert(block: nn.Module) -> str | None:
    """The attribute name of the block's shared expert."""
    for name in ("shared_experts", "shared_expert"):
        if isinstance(getattr(block, name, None), nn.Module):
            return name
    return None


def router_of(block: nn.Module) -> Any | None:
    """The block's router."""
    return next((m for n in ("gate", "router") if isinstance(m := getattr(block, n, None), nn.Module)), None)
