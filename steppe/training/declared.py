"""The working set that a run declares: predicted before anything is built, refused when it can't fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from steppe.core.policy import OFF
from steppe.core.shapes import BatchShape, Dtypes, MachineShape, RunShape
from steppe.core.units import parse_bytes
from steppe.planner.models import shape_from_config
from steppe.planner.working_set import COMPARED_STEPS, WorkingSet
from steppe.runtime.allocator import accelerator_memory_bytes
from steppe.runtime.attribution import attribute
from steppe.runtime.meter import Meter
from steppe.training.config import RunConfig


def working_set(config: RunConfig, model_config: Any, ranks: int, device: torch.device) -> WorkingSet | None:
    """The run's shape and policies on a device of known memory: `launch.device_memory`, else the accelerator's own.

    None on a CPU without a declared memory: there is nothing to judge by. Raises: ConfigError for a model type that
    the planner doesn't know.
    """
    memory = _device_memory(config, device)
    if memory is None:
        return None
    own = config.model.dtype
    state = own if config.flatten["optimizer"] == OFF else "float32"  # torch's AdamW keeps its moments as the weights
    dtypes = Dtypes(weight=own, gradient=own, state=state, activation=config.train.dtype)
    shape = RunShape(
        model=shape_from_config(model_config.to_dict()),
        batch=BatchShape(config.data.seq_len, config.train.batch, config.train.micro_batches),
        mesh=config.launch.mesh(ranks),
        machine=replace(
            MachineShape(), device_memory_bytes=memory, device="cpu" if device.type == "cpu" else "accelerator"
        ),
        dtypes=dtypes,
        attention="materialised" if config.model.attention == "eager" else "auto",
        keeps_outputs=False,  # the loop takes the loss out of the outputs and lets them go
    )
    return WorkingSet(shape, config.flatten)


@contextmanager
def judged(declared: WorkingSet | None, step: int, model: Any, optimizer: Any, *, tell: bool) -> Iterator[None]:
    """Meter steps 1 and 3 (`step` counts from 1) and warn, in one line, where they differ from what was predicted.

    Nothing is metered without a declared working set, nor in any other step. Peak: none. Exactness: bitwise.
    """
    if declared is None or step not in COMPARED_STEPS:
        yield
        return
    handle = attribute(model)
    try:
        with Meter(model, optimizer) as meter:
            yield
    finally:
        handle.remove()
    found = "; ".join(declared.deviations(meter.ledger(), step))
    if found and tell:
        warnings.warn(f"step {step} differs from its prediction: {found}", stacklevel=3)


def _device_memory(config: RunConfig, device: torch.device) -> int | None:
    if config.launch.device_memory:
        return parse_bytes(config.launch.device_memory)
    return accelerator_memory_bytes(device)
