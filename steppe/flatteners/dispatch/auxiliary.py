"""The model's own auxiliary loss from the counts of all ranks, for the time of its forward.

transformers' families call a function of their modelling module from `forward`. It is exchanged there while an attached
model runs, and put back when its forward has returned or raised, so that other models of the family keep theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from torch import nn

from steppe.flatteners.dispatch import router
from steppe.runtime import collectives, scopes

NAME: Final = "load_balancing_loss_func"


def use_counts_of_all_ranks(
    model: nn.Module, groups: Sequence[collectives.Group], as_share: Callable[[], bool] = lambda: False
) -> Callable[[], None]:
    """Let the model's forward take its auxiliary loss from `router.batch_loss`; returns the undo.

    `as_share` is asked at each forward. A model whose family has no such loss is left alone.
    """
    home = _home(model)
    if home is None:
        return lambda: None
    ours = scopes.region("router", partial(router.batch_loss, groups=tuple(groups)))
    theirs: list[Any] = []

    def enter(*_: Any) -> None:
        theirs.append(getattr(home, NAME))
        setattr(home, NAME, partial(ours, as_share=as_share()))

    def leave(*_: Any) -> None:
        if theirs:
            setattr(home, NAME, theirs.pop())

    hooks = model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)
    return lambda: [hook.remove() for hook in hooks] and None


class SharedCounts:
    """Plain experts whose auxiliary loss still is the whole batch's: what the plain program on several ranks needs."""

    def __init__(self, model: nn.Module, groups: Sequence[collectives.Group]) -> None:
        self.sums_shares = False
        self.detach = use_counts_of_all_ranks(model, groups, lambda: self.sums_shares)

    def stats(self) -> dict[str, Any]:
        return {"layers": [], "num_ranks": 1, "ties_pinned": False, "counters": {}}


def _home(model: nn.Module) -> Any | None:
    """The modelling module that the model's auxiliary loss is looked up in."""
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return next((module for module in modules if hasattr(module, NAME)), None)
