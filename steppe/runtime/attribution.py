"""Who is who in a model that knows nothing of labels: attention, experts, router, head and the boundaries.

`attribute(model)` wraps the forward of the modules that it recognises, by class name and by place, in regions
(scopes.py); Hugging Face's MoE families and plain modules built like them are recognised. `.remove()` takes all of
it off again. Results do not change by a bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final

import torch
from torch import nn

from steppe.runtime import scopes
from steppe.runtime.meter import charge
from steppe.runtime.naming import replace

_LAYER_LISTS: Final = ("layers", "blocks", "h")
_ATTENTION: Final = ("self_attn", "attn", "attention", "self_attention")
_ROUTERS: Final = ("gate", "router")
_HEADS: Final = ("lm_head", "output", "head")
_AUXILIARY_LOSS: Final = "load_balancing_loss_func"
COMPILED: Final = "compiled"  # no owner: modules whose insides nobody looks into


def attribute(model: nn.Module) -> Attribution:
    """Charge a model's attention, dispatch, router, vocab and boundary to their owners until `.remove()`.

    A boundary is a decoder layer's input under grad mode. The vocabulary is the head and `model.loss_function`; a loss
    computed elsewhere is charged by `scopes.region("vocab", loss_fn)`. Handles are removed in reverse order.
    """
    return Attribution(model)


class Attribution:
    """What was recognised, `found[owner]` = module names, and the way back."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[str, list[str]] = {}
        self._undo: list[Callable[[], None]] = []
        try:
            for owner, name, module in _roles(model):
                self.found.setdefault(owner, []).append(name)
                if owner == "boundary":
                    self._wrap_layer(module)
                elif owner != COMPILED:
                    self._wrap(module, _entry(module), owner)
            for prefix, core in _cores(model):
                if not any(prefix.startswith(name and f"{name}.") for name in self.found.get(COMPILED, ())):
                    self._wrap_losses(prefix, core)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Put every forward back as it was."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, holder: Any, name: str, owner: str) -> None:
        self._undo.append(replace(holder, name, scopes.region(owner, getattr(holder, name))))

    def _wrap_layer(self, layer: nn.Module) -> None:
        entry = _entry(layer)
        self._undo.append(replace(layer, entry, _at_boundary(getattr(layer, entry))))
        # Hugging Face checkpoints below the instance's forward: its recompute must start free of labels as well.
        recompute = vars(layer).get("_gradient_checkpointing_func")
        if recompute is not None:
            self._undo.append(replace(layer, "_gradient_checkpointing_func", _label_free(recompute)))

    def _wrap_losses(self, prefix: str, model: nn.Module) -> None:
        loss = getattr(model, "loss_function", None)
        if callable(loss) and not isinstance(loss, nn.Module):
            self.found.setdefault("vocab", []).append(f"{prefix}loss_function")
            name = "_loss_function" if isinstance(getattr(type(model), "loss_function", None), property) else None
            self._undo.append(replace(model, name or "loss_function", scopes.region("vocab", loss)))
        code = sys.modules.get(_written_class(model).__module__)
        if code is not None and hasattr(code, _AUXILIARY_LOSS):
            self.found.setdefault("router", []).append(_AUXILIARY_LOSS)
            self._wrap(code, _AUXILIARY_LOSS, "router")


def _roles(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """(owner, name, module) of everything recognised; what lies inside attention or experts belongs to them.

    A compiled module is charged from outside: a label inside would break its graph, and measure another program.
    """
    taken: list[str] = []
    cores = [core for _, core in _cores(model)]
    heads = [core.get_output_embeddings() for core in cores if _has(core, "get_output_embeddings")]
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in taken):
            continue
        if _is_compiled(module):
            taken.append(name and f"{name}.")
            yield COMPILED, name, module
        if not name:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        is_head = any(module is head for head in heads)
        owner = "vocab" if is_head else _role(name, module, parent, at_root=any(parent is core for core in cores))
        if owner is not None:
            yield owner, name, module
            if owner != "boundary":
                taken.append(f"{name}.")


def _cores(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(prefix of its names, module) of the outermost modules that have a head or a loss of Hugging Face's, under
    whatever wraps them (DDP, torch.compile, adapters, a trainer's module); else the model without its wrappers.

    A wrapper may answer for what it wraps, so only what a class or an instance itself has counts.
    """
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(prefix) for prefix, _ in outermost)
        if not inside and (_has(module, "get_output_embeddings") or _has(module, "loss_function")):
            outermost.append((f"{name}." if name else "", module))
    if outermost:
        return outermost
    prefix = ""
    while len(children := list(model.named_children())) == 1 and not list(model.parameters(recurse=False)):
        ((name, model),) = children
        prefix += f"{name}."
    return [(prefix, model)]


def _has(module: nn.Module, name: str) -> bool:
    return hasattr(type(module), name) or name in vars(module)


def _role(name: str, module: nn.Module, parent: nn.Module, *, at_root: bool) -> str | None:
    kind, place = type(getattr(module, "_orig_mod", module)).__name__, name.rpartition(".")[2]
    if kind.endswith("DecoderLayer") or (isinstance(parent, nn.ModuleList) and _is_layer_list(name)):
        return "boundary"
    if "Attention" in kind or place in _ATTENTION:
        return "attention"
    if kind.endswith("Experts") or place == "experts":
        return "dispatch"
    if kind.endswith("Router") or (place in _ROUTERS and hasattr(parent, "experts")):
        return "router"
    if at_root and place in _HEADS and isinstance(module, nn.Linear):
        return "vocab"
    return None


def _is_layer_list(name: str) -> bool:
    path = name.split(".")
    return len(path) >= 2 and path[-2] in _LAYER_LISTS


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def _entry(module: nn.Module) -> str:
    """The attribute to wrap: what was compiled is called as a whole, so that no label lies inside a graph."""
    return "forward" if getattr(module, "_compiled_call_impl", None) is None else "_compiled_call_impl"


def _at_boundary(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def entered(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor) and torch.is_grad_enabled() and not scopes.in_backward():
            charge(hidden, "boundary")
        with scopes.fresh():
            return forward(*args, **kwargs)

    return entered


def _label_free(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(checkpoint)
    def checkpointed(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        @wraps(block)
        def started(*inner: Any, **named: Any) -> Any:
            with scopes.fresh():
                return block(*inner, **named)

        return checkpoint(started, *args, **kwargs)

    return checkpointed


def _written_class(model: nn.Module) -> type:
    """The class as somebody wrote it: FSDP2 puts a generated one in front."""
    return next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))
