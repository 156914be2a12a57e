"""Loading optimizer state straight into the slabs: all of it is checked first, then copied, and nothing is cast down.

States of torch.optim.AdamW load as well: they have no masters, so masters are the parameters; 16-bit moments widen
exactly. Which parameters a saved state belongs to follows torch's rule: the order of the groups.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from steppe.core.errors import CheckpointError
from steppe.flatteners.optimizer.rows import STATE, Row
from steppe.runtime import sharded

MOMENTS = ("exp_avg", "exp_avg_sq")
WIDENING = (torch.float32, torch.bfloat16, torch.float16)
NO_CAST = "states of AdamW in float32 (16-bit moments widen exactly)"


class Loaded(NamedTuple):
    """One parameter's saved state, checked: this rank's tensors and the step count."""

    step: float
    tensors: dict[str, torch.Tensor]


def checked_groups(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The saved hyper-parameters with this optimizer's parameters, or a refusal."""
    ours, theirs = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
    if ours != theirs:
        raise CheckpointError("groups of a saved optimizer state", got=f"{theirs} parameters a group", allowed=ours,
                              remedy="load the state of this model, with the same parameter groups")  # fmt: skip
    for group in saved:
        if group.get("amsgrad") or group.get("decoupled_weight_decay") is False:
            raise CheckpointError("kind of a saved optimizer state", got="Adam or AMSGrad", allowed="AdamW",
                                  remedy="its moments mean something else; start from fresh state")  # fmt: skip
    return [{**own, **theirs, "params": own["params"]} for own, theirs in zip(groups, saved)]


def checked_state(
    groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]], saved: Mapping[Any, Any]
) -> dict[torch.Tensor, Loaded]:
    """Every saved entry matched with its parameter and checked; a refusal leaves nothing changed."""
    names = [name for group in saved_groups for name in group["params"]]
    parameters = dict(zip(names, (p for group in groups for p in group["params"])))
    if strangers := sorted(str(name) for name in saved if name not in parameters):
        raise CheckpointError("entries of a saved optimizer state", got=f"entries {strangers} of no parameter",
                              allowed=f"{len(parameters)} parameters of the groups",
                              remedy="load the state of this model")  # fmt: skip
    if any("master" in entry for entry in saved.values()):
        lost = sorted(str(name) for name, p in parameters.items() if p.requires_grad and name not in saved)
        if lost:
            raise CheckpointError("entries of a saved optimizer state", got=f"none for parameters {lost}",
                                  allowed="one for each trainable parameter",
                                  remedy="the file is truncated; load a complete one")  # fmt: skip
    return {parameters[name]: _checked_entry(name, parameters[name], entry) for name, entry in saved.items()}


def _checked_entry(name: object, parameter: torch.Tensor, entry: Mapping[str, Any]) -> Loaded:
    missing = [key for key in ("step", *MOMENTS) if key not in entry]
    extra = sorted(set(entry) - {"step", *STATE})
    if missing or extra:
        raise CheckpointError(f"saved state of parameter {name}", got=f"keys {sorted(map(str, entry))}",
                              allowed="step, exp_avg, exp_avg_sq and optionally master",
                              remedy="load a complete state of AdamW")  # fmt: skip
    tensors = {key: _checked_tensor(f"{key} of parameter {name}", entry[key], parameter)
               for key in STATE if key in entry}  # fmt: skip
    return Loaded(_checked_step(name, entry["step"]), tensors)


def _checked_tensor(what: str, value: object, parameter: torch.Tensor) -> torch.Tensor:
    remedy = "load the state of this model; reshard between numbers of ranks with torch.distributed.checkpoint"
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise CheckpointError(what, got=got, allowed=f"a tensor of shape {tuple(parameter.shape)}", remedy=remedy)
    if sharded.is_sharded(value) != sharded.is_sharded(parameter):
        kinds = {True: "a DTensor", False: "a plain tensor"}
        raise CheckpointError(what, got=kinds[sharded.is_sharded(value)], allowed=kinds[sharded.is_sharded(parameter)],
                              remedy=remedy)  # fmt: skip
    own = sharded.local_as(value.detach(), parameter)
    if own.dtype not in WIDENING:
        raise CheckpointError(f"dtype of {what}", got=own.dtype, allowed=NO_CAST, remedy="save the state in float32")
    if own.shape != sharded.local(parameter).shape:
        raise CheckpointError(f"this rank's part of {what}", got=tuple(own.shape),
                              allowed=tuple(sharded.local(parameter).shape), remedy=remedy)  # fmt: skip
    return own


def _checked_step(name: object, value: object) -> float:
    step = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if not isinstance(step, numbers.Real) or not math.isfinite(step) or step < 0 or step != int(step):
        raise CheckpointError(f"step of parameter {name}", got=value, allowed="a whole number from 0",
                              remedy="load a state saved by AdamW")  # fmt: skip
    return float(step)


@torch.no_grad()
def fill(row: Row, loaded: Loaded | None) -> None:
    """Copy a saved state into a row's slabs; None is the state before the first step."""
    row.forget()
    if loaded is None:
        row.step.zero_()
        row.exp_avg.zero_()
        row.exp_avg_sq.zero_()
        return
    row.step.fill_(loaded.step)
    for key, value in loaded.tensors.items():
        if key == "master" and row.owns_master:
            continue  # weights win, and this master is the weight
        target = sharded.local(row.slabs[key])
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)
