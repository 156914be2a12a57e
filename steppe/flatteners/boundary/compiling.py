"""torch.compile inside the checkpoint: attention and norms of each block, or the block's function.

Outside of the checkpoint Dynamo meets saved-tensor hooks and gives the whole frame up, silently; inside there is no
graph break at attention and norms. Graphs are counted, so that a run that compiled nothing can say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from steppe.core.errors import ConfigError
from steppe.flatteners.boundary.budget import BoundaryPolicy

_ATTENTION = ("attn", "attention")
# Where a row's length stands in what parts are given: positions [B,S], hidden states and rotary tables [B,S,.], masks
# [B,1,S,S].
_LENGTHS = {2: (1,), 3: (1,), 4: (2, 3)}


class Compiler:
    """Compiles what the policy says and counts the graphs. Exactness: reordered against eager."""

    def __init__(self, policy: BoundaryPolicy) -> None:
        self.mode = policy.compile
        self.graphs = 0
        self._backend, self._varying = policy.compile_backend, policy.compile_varying
        if self.mode != "off":
            _check_backend(self._backend)
        self._parts: list[nn.Module] = []
        self._blocks: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()

    def backend(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """The policy's backend, counted."""
        self.graphs += 1
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(self._backend)(graph, inputs)
        return compiled

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Compile attention and norms of each block in place. Raises ConfigError when a block has neither."""
        if self.mode != "parts":
            return
        for block in blocks:
            parts = [child for name, child in block.named_children() if _is_dense_part(name, child)]
            if not parts:
                raise ConfigError(
                    "boundary compile", got=f"parts, but {type(block).__name__} has no attention or norm",
                    allowed='blocks with children named "...attn" or of a Norm class', remedy='use compile="block"',
                )  # fmt: skip
            for part in parts:
                part.compile(backend=self.backend)
                if self._varying:
                    part._compiled_call_impl = partial(_marked, part._compiled_call_impl)
            self._parts += parts

    def detach(self) -> None:
        for part in self._parts:
            part._compiled_call_impl = None
        self._parts.clear()
        self._blocks.clear()

    def of_block(self, module: nn.Module | None, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, compiled once per module where whole blocks are compiled."""
        if self.mode != "block" or module is None:
            return fn
        if isinstance(fn, partial):  # Hugging Face hands in partial(forward, block, **keywords)
            return partial(self.of_block(module, fn.func), *fn.args, **fn.keywords)
        if module not in self._blocks:
            self._blocks[module] = torch.compile(fn, backend=self.backend)
        return self._blocks[module]


def _marked(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled part with the length of its tensors marked dynamic (a hint: 0 and 1 are still special)."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            for dim in _LENGTHS.get(leaf.dim(), ()):
                torch._dynamo.maybe_mark_dynamic(leaf, dim)
    return compiled(*args, **kwargs)


def _check_backend(name: str) -> None:
    """Raises: ConfigError for a backend that torch doesn't know, before anything is compiled."""
    try:
        torch._dynamo.lookup_backend(name)
    except torch._dynamo.exc.InvalidBackend:  # what the policy says is used later, inside a backward
        known = ", ".join(torch._dynamo.list_backends())
        raise ConfigError(
            "boundary compile_backend", got=repr(name), allowed=known, remedy="choose one of them"
        ) from None


def _is_dense_part(name: str, child: nn.Module) -> bool:
    return any(word in name.lower() for word in _ATTENTION) or type(child).__name__.endswith("Norm")
