"""The working set that a run declares: predicted before anything is built, refused when it can't fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from steppe.core.shapes import BatchShape, Dtypes, MachineShape, RunShape
from steppe.core.units import parse_bytes
from steppe.planner.models import shape_from_config
from steppe.planner.working_set import WorkingSet
from steppe.runtime.allocator import accelerator_memory_bytes
from steppe.training.config import RunConfig


def working_set(config: RunConfig, model_config: Any, ranks: int, device: torch.device) -> WorkingSet | None:
    """The run's shape and policies on a device of known memory: `launch.device_memory`, else the accelerator's own.

    None on a CPU without a declared memory: there is nothing to judge by. Raises: ConfigError for a model type that
    the planner doesn't know.
    """
    memory = _device_memory(config, device)
    if memory is None:
        return None
    dtypes = Dtypes(weight=config.model.dtype, gradient=config.model.dtype, activation=config.train.dtype)
    shape = RunShape(
        model=shape_from_config(model_config.to_dict()),
        batch=BatchShape(config.data.seq_len, config.train.batch, config.train.micro_batches),
        mesh=config.launch.mesh(ranks),
        machine=replace(
            MachineShape(), device_memory_bytes=memory, device="cpu" if device.type == "cpu" else "accelerator"
        ),
        dtypes=dtypes,
        keeps_outputs=False,  # the loop takes the loss out of the outputs and lets them go
    )
    return WorkingSet(shape, config.flatten)


def _device_memory(config: RunConfig, device: torch.device) -> int | None:
    if config.launch.device_memory:
        return parse_bytes(config.launch.device_memory)
    return accelerator_memory_bytes(device)
