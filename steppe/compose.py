"""Join any subset of the four flatteners to a live model; knows none of them by name.

Each flattener's `attach.py` gives `attach(model, policy, mesh)`, `conflicts(*live)` and `diagnose(stats)`. What it
attaches has `detach()` and `stats()`, and may offer `loss` or `optimizer` for the step to use instead of the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steppe.core.errors import ConfigError, ConflictError
from steppe.core.policy import OFF
from steppe.flatteners import NAMES, half


@dataclass
class Flattened:
    """A model with flatteners attached; `detach()` gives the plain model back."""

    model: Any
    attached: dict[str, Any]

    def offers(self, what: str) -> Any | None:
        """What the attached flatteners put in place of the plain `what` ("loss", "optimizer"); None: the plain one."""
        for handle in self.attached.values():
            if (offered := getattr(handle, what, None)) is not None:
                return offered
        return None

    def stats(self) -> dict[str, Any]:
        return {name: handle.stats() for name, handle in self.attached.items()}

    def diagnose(self) -> tuple[str, ...]:
        """The failure signals of every attached flattener, in words."""
        return tuple(line for name, stats in self.stats().items() for line in half(name, "attach").diagnose(stats))

    def detach(self) -> None:
        while self.attached:
            self.attached.popitem()[1].detach()


def attach_all(model: Any, policies: Mapping[str, Any], mesh: Any = None) -> Flattened:
    """Attach every flattener whose policy isn't off, in the design's order.

    Raises: ConfigError for an unknown flattener; ConflictError for what a flattener finds on the live model. Nothing
    stays attached after an error.
    """
    if unknown := sorted(set(policies) - set(NAMES)):
        raise ConfigError("flattener", got=unknown, allowed=NAMES, remedy="use these names")
    wanted = {name: policies[name] for name in NAMES if policies.get(name, OFF) != OFF}
    for name in wanted:
        refuse_conflicts(name, model)
    flattened = Flattened(model, {})
    try:
        for name, policy in wanted.items():
            flattened.attached[name] = half(name, "attach").attach(model, policy, mesh)
    except BaseException:
        flattened.detach()
        raise
    return flattened


def refuse_conflicts(name: str, *live: Any) -> None:
    """Raise ConflictError when a flattener finds something live that would undo its work."""
    for conflict in half(name, "attach").conflicts(*live):
        raise ConflictError(f"{name} flattener", got=conflict.what, allowed="neither or one", remedy=conflict.remedy)
